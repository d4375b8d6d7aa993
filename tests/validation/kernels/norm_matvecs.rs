//! A norm and the products of its result in one launch.

use gpu_kernels::blocks::GgmlType;
use host::gpu::ops::{
    Matvec, Norm, OpError, Product, Q8, matvec, matvec_q8, norm_matvecs, rms_norm_q8, takes_norm, takes_q8,
};
use host::gpu::{Buffer, Device};

use super::formats::{dequantize, random_blocks};
use super::matvec::{dot, tolerance};
use super::{EPS, Output, Random, Weights, assert_close, assert_same_bits, devices, input, wide};

/// Rows of each product, and whether it is F32: numbers that leave items and tiles partly empty, and enough that a lane
/// of the emulated device goes on to further ones.
const PARTS: [(u32, bool); 4] = [(37, false), (9, true), (410, false), (1, true)];
const NORM_EPS: f32 = 1e-3;

/// A normed row in both forms, poisoned and guarded.
struct Normed<D: Device> {
    y: Output<D, f32>,
    qs: Output<D, i8>,
    d: Output<D, f32>,
    s: Output<D, f32>,
    cols: u32,
}

impl<D: Device> Normed<D> {
    fn new(device: &D, cols: u32) -> Self {
        let n = cols as usize;
        let (qs, d, s) = (Output::new(device, n), Output::new(device, n / 16), Output::new(device, n / 16));
        Normed { y: Output::new(device, n), qs, d, s, cols }
    }

    fn q8(&self) -> Q8<'_> {
        Q8 { qs: self.qs.slice(), d: self.d.slice(), s: self.s.slice(), cols: self.cols }
    }

    fn norm<'a>(&'a self, x: &'a Buffer<D, f32>, w: &'a Buffer<D, f32>) -> Norm<'a> {
        Norm { x: x.slice(), w: w.slice(), eps: NORM_EPS, y: self.y.slice(), q8: self.q8() }
    }

    /// The values that products in F32, and those of integers, stand for.
    fn values(&self, device: &D) -> [Vec<f64>; 2] {
        let (qs, d) = (self.qs.read(device), self.d.read(device));
        let quantised = qs.iter().enumerate().map(|(i, &q)| f64::from(q) * f64::from(d[i / 16]));
        [wide(&self.y.read(device)), quantised.collect()]
    }
}

devices! {
    /// Against the definition, and to the bits of the operations one by one.
    fn norm_matvecs_are_the_norm_and_its_products(device) {
        let mut random = Random::new(31);
        let types: Vec<GgmlType> = GgmlType::ALL.iter().copied().filter(|ty| takes_q8(*ty)).collect();
        for (i, &quantised) in types.iter().enumerate() {
            // The last is longer than what a lane of the norm has in registers.
            let cols = [256u32, 2304, 512, 4352][i % 4];
            for n_parts in [4usize, 1, 3] {
                let parts: Vec<_> = PARTS[..n_parts]
                    .iter()
                    .map(|&(rows, plain)| {
                        let rows = if cols > 4000 { rows.min(90) } else { rows };
                        let ty = if plain { GgmlType::F32 } else { quantised };
                        let file = random_blocks(&mut random, ty, (rows * cols) as usize);
                        (Weights::new(device, ty, [1, rows, cols], &file), dequantize(ty, &file), rows)
                    })
                    .collect();
                let (x, w) = (random.units(cols as usize), random.units(cols as usize));
                let (x_device, w_device) = (input(device, &x), input(device, &w));
                let (normed, alone) = (Normed::new(device, cols), Normed::new(device, cols));
                let outputs: Vec<_> =
                    parts.iter().map(|(_, _, rows)| Output::<_, f32>::new(device, *rows as usize)).collect();
                let products: Vec<_> = parts
                    .iter()
                    .zip(&outputs)
                    .map(|((w, _, rows), y)| Product { w: w.matrix(), y: y.slice(), y_stride: *rows })
                    .collect();
                norm_matvecs(device, &products, &normed.norm(&x_device, &w_device), true).expect("norm_matvecs");

                let what = format!("norm_matvecs {quantised}, {n_parts} x {cols}");
                let mean = wide(&x).iter().map(|x| x * x).sum::<f64>() / f64::from(cols);
                let scale = 1.0 / (mean + f64::from(NORM_EPS)).sqrt();
                let want: Vec<f64> = wide(&x).iter().zip(wide(&w)).map(|(x, w)| x * scale * w).collect();
                // A lane adds `cols / 1024` fours, the block eight more; a square root and two products.
                let roundings = f64::from(cols / 256) + 20.0;
                assert_close(&what, &normed.y.read(device), &want, |i| roundings * EPS * want[i].abs());
                let (y, q8) = (alone.y.slice(), alone.q8());
                rms_norm_q8(device, x_device.slice(), w_device.slice(), y, q8, NORM_EPS).expect("rms_norm_q8");
                assert_same_bits(&what, &normed.y.read(device), &alone.y.read(device));
                assert_same_bits(&what, &normed.qs.read(device), &alone.qs.read(device));
                assert_same_bits(&what, &normed.d.read(device), &alone.d.read(device));
                assert_same_bits(&what, &normed.s.read(device), &alone.s.read(device));

                let forms = normed.values(device);
                for (((w, values, rows), y), product) in parts.iter().zip(&outputs).zip(&products) {
                    let (got, plain) = (y.read(device), w.matrix().ty() == GgmlType::F32);
                    let x = &forms[usize::from(!plain)];
                    let dots: Vec<_> = values.chunks_exact(cols as usize).map(|w| dot(w, x)).collect();
                    let want: Vec<f64> = dots.iter().map(|(sum, _)| *sum).collect();
                    assert_close(&what, &got, &want, |i| tolerance(cols) * dots[i].1);

                    let one = Output::<_, f32>::new(device, *rows as usize);
                    let op = Matvec::new(product.w, one.slice(), 1);
                    let launched = if plain {
                        matvec(device, &op, alone.y.slice(), cols)
                    } else {
                        matvec_q8(device, &op, alone.q8())
                    };
                    launched.expect("matvec");
                    assert_same_bits(&what, &got, &one.read(device));
                }
            }
        }
    }

    fn norm_matvecs_refuses_what_one_launch_cannot_do(device) {
        let (cols, rows) = (64u32, 4);
        let of = |ty: GgmlType, cols: u32| {
            Weights::new(device, ty, [1, rows, cols], &vec![0; (rows * cols) as usize / ty.block_elems() * ty.block_bytes()])
        };
        let (q8_0, q4_0, f32s, long) =
            (of(GgmlType::Q8_0, cols), of(GgmlType::Q4_0, cols), of(GgmlType::F32, cols), of(GgmlType::Q8_0, 128));
        let (x, w) = (input(device, &[1.0; 64]), input(device, &[1.0; 64]));
        let normed = Normed::new(device, cols);
        let norm = normed.norm(&x, &w);
        let y = device.alloc_zeroed::<f32>(64).expect("memory");
        let part = |w, i: usize| Product { w, y: y.slice().part(8 * i..8 * i + 4).expect("inside"), y_stride: 4 };
        let run = |products: &[Product<'_>], norm: &Norm<'_>| norm_matvecs(device, products, norm, false);
        let operand = |result| matches!(result, Err(OpError::Operand { .. }));
        let ty = |result| matches!(result, Err(OpError::Type { .. }));
        let (a, b) = (part(q8_0.matrix(), 0), part(f32s.matrix(), 1));
        run(&[a, b], &norm).expect("the products that the others are changed from");
        assert!(operand(run(&[], &norm)), "none");
        assert!(operand(run(&[a, b, b, b, b], &norm)), "too many");
        assert!(operand(run(&[a, a], &norm)), "results overlap");
        assert!(operand(run(&[a, part(long.matrix(), 1)], &norm)), "other columns");
        assert!(operand(run(&[Product { y: x.slice(), ..a }], &norm)), "y overlaps x");
        assert!(operand(run(&[Product { y: normed.y.slice(), ..a }], &norm)), "y overlaps the normed row");
        assert!(operand(run(&[a], &Norm { y: x.slice(), ..norm })), "the normed row overlaps x");
        assert!(operand(run(&[a], &Norm { x: y.slice().part(0..32).expect("inside"), ..norm })), "a short row");
        assert!(ty(run(&[a, part(q4_0.matrix(), 1)], &norm)), "two quantised types");
        assert!(ty(run(&[b], &norm)), "no quantised type");
        assert!(takes_norm(8192) && !takes_norm(8224), "what fits the shared memory that every device has");
    }
}
