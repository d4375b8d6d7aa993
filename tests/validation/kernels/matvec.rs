//! Matrix times vector, all weight types, both kinds of activations.

use gpu_kernels::blocks::GgmlType;
use gpu_kernels::params::{Activations, MATVEC_BLOCK, MatvecShape, shares_by_block};
use host::gpu::ops::{Experts, Matvec, OpError, Q8, matvec, matvec_q8, quantize_q8, takes_q8};
use host::gpu::{Buffer, Device};

use super::formats::{Value, dequantize, golden, random_blocks, unhex};
use super::{Output, Random, Weights, assert_close, assert_same_bits, devices};

/// Activations on a device, in both forms, and what the kernels make of them.
pub(super) struct Input<D: Device> {
    cols: u32,
    pub(super) x: Buffer<D, f32>,
    qs: Buffer<D, i8>,
    d: Buffer<D, f32>,
    s: Buffer<D, f32>,
    /// A zero for each row.
    zeros: Buffer<D, u32>,
    /// The values that the plain kernels read.
    plain: Vec<f64>,
    /// The values that the quantised form stands for.
    quantized: Vec<f64>,
}

impl<D: Device> Input<D> {
    pub(super) fn new(device: &D, x: &[f32], cols: u32) -> Self {
        let n = x.len();
        let x_device = device.alloc_from(x).expect("memory");
        let qs = device.alloc(n).expect("memory");
        let (d, s) = (device.alloc(n / 16).expect("memory"), device.alloc(n / 16).expect("memory"));
        let out = Q8 { qs: qs.slice(), d: d.slice(), s: s.slice(), cols };
        quantize_q8(device, x_device.slice(), cols, out, n as u32 / cols).expect("quantize_q8");
        let integers: Vec<i8> = device.download_vec(qs.slice()).expect("download");
        let scales: Vec<f32> = device.download_vec(d.slice()).expect("download");
        let quantized = integers.iter().enumerate().map(|(i, &q)| f64::from(q) * f64::from(scales[i / 16]));
        Input {
            cols,
            x: x_device,
            qs,
            d,
            s,
            zeros: device.alloc_zeroed(n / cols as usize).expect("memory"),
            plain: x.iter().map(|&x| f64::from(x)).collect(),
            quantized: quantized.collect(),
        }
    }

    /// The quantised form.
    pub(super) fn q8(&self) -> Q8<'_> {
        Q8 { qs: self.qs.slice(), d: self.d.slice(), s: self.s.slice(), cols: self.cols }
    }

    pub(super) fn values(&self, form: Activations) -> &[f64] {
        match form {
            Activations::Plain => &self.plain,
            _ => &self.quantized,
        }
    }

    pub(super) fn run(&self, device: &D, form: Activations, op: &Matvec<'_>) -> Result<u64, OpError> {
        let x = self.q8();
        // Several tokens of a dense product take the kernel for four; expert 0 of one is the same product,
        // and takes the kernel for one.
        let only_expert = Experts { ids: self.zeros.slice(), ids_stride: 1, n_used: 1, shared_x: true };
        match form {
            Activations::Plain => matvec(device, op, self.x.slice(), self.cols),
            Activations::Q8 => matvec_q8(device, &Matvec { experts: op.experts.or(Some(only_expert)), ..*op }, x),
            Activations::Q8x4 => matvec_q8(device, op, x),
        }
    }
}

/// `Σ_k w[k]·x[k]`, and `Σ_k |w[k]|·|x[k]|` with the sizes of the weights' terms.
pub(super) fn dot(w: &[Value], x: &[f64]) -> (f64, f64) {
    w.iter().zip(x).fold((0.0, 0.0), |(sum, size), (w, x)| (sum + w.sum() * x, size + w.size() * x.abs()))
}

/// Rounding errors of a product, in units of `Σ |w|·|x|`: each lane adds up to `cols / lanes` numbers (at
/// worst all of a short row), the warp five times, and a weight or a block's product takes up to ten
/// roundings of its own. Each is at most 2^-24 of what it rounds.
pub(super) fn tolerance(cols: u32) -> f64 {
    (f64::from(cols.div_ceil(32)).max(32.0) + 5.0 + 10.0) * 2f64.powi(-24)
}

fn forms(ty: GgmlType) -> impl Iterator<Item = Activations> {
    let q8 = move |form: &Activations| *form == Activations::Plain || takes_q8(ty);
    [Activations::Plain, Activations::Q8, Activations::Q8x4].into_iter().filter(q8)
}

/// The columns to test: a block, and numbers of chunks that leave lanes idle, fill a warp, and more.
fn columns(ty: GgmlType) -> Vec<u32> {
    match ty.block_elems() {
        256 => vec![256, 512, 768, 2304],
        // 2880 is gpt-oss's: 90 chunks of 32 elements.
        _ => vec![32, 96, 544, 1056, 2880],
    }
}

/// A block in hexadecimal, and what some of its elements are; the others are 0.
type Case<'a> = (GgmlType, String, &'a [(usize, f32)]);

devices! {
    fn matvec_of_golden_blocks(device) {
        for (ty, file, values) in golden() {
            let cols = ty.block_elems().max(32) as u32;
            let rows = (values.len() as u32 / cols).min(3);
            let n = (rows * cols) as usize;
            let w = Weights::new(device, ty, [1, rows, cols], &file[..n / ty.block_elems() * ty.block_bytes()]);
            let sizes = dequantize(ty, &file);
            // Token k is the k-th unit vector, so y[k, r] = w[r, k].
            let mut units = vec![0.0; (cols * cols) as usize];
            (0..cols as usize).for_each(|k| units[k * cols as usize + k] = 1.0);
            let input = Input::new(device, &units, cols);
            for form in forms(ty) {
                let y = Output::new(device, n);
                input.run(device, form, &Matvec::new(w.matrix(), y.slice(), cols)).expect("matvec");
                let got: Vec<f32> = y.read(device);
                for (i, &want) in values[..n].iter().enumerate() {
                    let got = got[i % cols as usize * rows as usize + i / cols as usize];
                    // Sums of zeros and one value are exact; a quantised 1 is 127 times a rounded 1/127.
                    let bound = if form == Activations::Plain { 0.0 } else { 8.0 * sizes[i].size() * 2f64.powi(-24) };
                    let error = (f64::from(got) - f64::from(want)).abs();
                    assert!(error <= bound, "{ty} {form:?} [{i}]: got {got:e}, want {want:e} ± {bound:e}");
                }
            }
        }
    }

    fn matvec_at_odd_sizes(device) {
        let mut random = Random::new(4);
        for &ty in GgmlType::ALL {
            for (cols, rows) in columns(ty).into_iter().zip([1, 67, 5, 3, 9]) {
                let file = random_blocks(&mut random, ty, (rows * cols) as usize);
                let values = dequantize(ty, &file);
                let w = Weights::new(device, ty, [1, rows, cols], &file);
                let tokens = if rows == 5 { 3 } else if rows == 9 { 9 } else { 1 };
                let input = Input::new(device, &random.units((tokens * cols) as usize), cols);
                for form in forms(ty) {
                    let y = Output::new(device, (tokens * rows) as usize);
                    let op = Matvec::new(w.matrix(), y.slice(), tokens);
                    input.run(device, form, &op).expect("matvec");
                    let got: Vec<f32> = y.read(device);
                    let x = input.values(form).chunks_exact(cols as usize);
                    let dots: Vec<_> =
                        x.flat_map(|x| values.chunks_exact(cols as usize).map(move |w| dot(w, x))).collect();
                    let want: Vec<f64> = dots.iter().map(|(sum, _)| *sum).collect();
                    let name = if form == Activations::Plain { "matvec" } else { "matvec_q8" };
                    let what = format!("{name} {ty} {rows}x{cols}");
                    assert_close(&what, &got, &want, |i| tolerance(cols) * dots[i].1);

                    input.run(device, form, &op).expect("again");
                    let again: Vec<f32> = y.read(device);
                    assert!(got.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: a rerun differs");
                }
            }
        }
    }

    fn matvec_of_experts_with_bias_onto_what_is_there(device) {
        let mut random = Random::new(5);
        for (ty, shared_x) in [(GgmlType::Q4K, true), (GgmlType::Q5K, false), (GgmlType::Mxfp4, true), (GgmlType::F32, false)] {
            let [n_expert, rows, cols] = [3u32, 37, 256];
            let (tokens, n_used) = (2u32, 2u32);
            let routes = (tokens * n_used) as usize;
            let file = random_blocks(&mut random, ty, (n_expert * rows * cols) as usize);
            let values = dequantize(ty, &file);
            let w = Weights::new(device, ty, [n_expert, rows, cols], &file);
            // Rows of four ids, two of which count; 9 is past the end and stands for the last expert.
            let ids = device.alloc_from(&[2u32, 0, 77, 77, 1, 9, 77, 77]).expect("memory");
            let experts = [2usize, 0, 1, 2];
            let bias = random.units((n_expert * rows) as usize);
            let bias_device = device.alloc_from(&bias).expect("memory");
            let before = random.units(routes * 40);
            let x_rows = if shared_x { tokens as usize } else { routes };
            let input = Input::new(device, &random.units(x_rows * cols as usize), cols);
            for form in forms(ty) {
                let y = Output::holding(device, &before);
                let op = Matvec {
                    y_stride: 40,
                    bias: Some(bias_device.slice()),
                    experts: Some(Experts { ids: ids.slice(), ids_stride: 4, n_used, shared_x }),
                    accumulate: true,
                    dependent: true,
                    ..Matvec::new(w.matrix(), y.slice(), tokens)
                };
                input.run(device, form, &op).expect("matvec");
                let got: Vec<f32> = y.read(device);
                for (route, &expert) in experts.iter().enumerate() {
                    let x_row = if shared_x { route / n_used as usize } else { route };
                    let x = &input.values(form)[x_row * cols as usize..][..cols as usize];
                    for r in 0..rows as usize {
                        let row = expert * rows as usize + r;
                        let (sum, size) = dot(&values[row * cols as usize..][..cols as usize], x);
                        let (bias, before) = (f64::from(bias[row]), f64::from(before[route * 40 + r]));
                        let got = f64::from(got[route * 40 + r]);
                        let bound = tolerance(cols) * (size + bias.abs() + before.abs());
                        let want = sum + bias + before;
                        assert!((got - want).abs() <= bound, "{ty} {form:?} route {route}, row {r}: {got} for {want}");
                    }
                    assert_eq!(got[route * 40 + 37..][..3], before[route * 40 + 37..][..3], "{ty}: past the rows");
                }
            }
        }
    }

    /// Of one row of activations in a grid that fits the device: against the definition, and to the bits of the kernel
    /// whose blocks end with their rows.
    fn matvec_of_one_row_goes_from_row_to_row(device) {
        let mut random = Random::new(6);
        for (i, &ty) in GgmlType::ALL.iter().filter(|ty| takes_q8(**ty)).enumerate() {
            // More than the emulated device's warps take at once; rows of one step, of a part of one, and of several.
            let (rows, cols) = (331u32, [256u32, 2304, 512, 1280][i % 4]);
            let file = random_blocks(&mut random, ty, (rows * cols) as usize);
            let values = dequantize(ty, &file);
            let w = Weights::new(device, ty, [1, rows, cols], &file);
            let input = Input::new(device, &random.units(cols as usize), cols);
            let (before, bias) = (random.units(rows as usize), random.units(rows as usize));
            let bias_device = device.alloc_from(&bias).expect("memory");
            for accumulate in [false, true] {
                let (y, ended) = (Output::holding(device, &before), Output::holding(device, &before));
                let bias_slice = accumulate.then(|| bias_device.slice());
                let op = Matvec { bias: bias_slice, accumulate, dependent: true, ..Matvec::new(w.matrix(), y.slice(), 1) };
                matvec_q8(device, &op, input.q8()).expect("matvec_q8");
                input.run(device, Activations::Q8, &Matvec { y: ended.slice(), ..op }).expect("matvec_q8");
                let what = format!("matvec_swept {ty} {rows} x {cols}");
                let got: Vec<f32> = y.read(device);
                assert_same_bits(&what, &got, &ended.read(device));
                let dots: Vec<_> =
                    values.chunks_exact(cols as usize).map(|w| dot(w, input.values(Activations::Q8))).collect();
                let added = |r: usize| if accumulate { [f64::from(bias[r]), f64::from(before[r])] } else { [0.0; 2] };
                let want: Vec<f64> = dots.iter().enumerate().map(|(r, (sum, _))| sum + added(r)[0] + added(r)[1]).collect();
                assert_close(&what, &got, &want, |r| {
                    tolerance(cols) * (dots[r].1 + added(r)[0].abs() + added(r)[1].abs())
                });
            }
        }
    }

    /// B22: orders inside a block that tests with zero blocks, or none, do not see.
    fn matvec_keeps_the_order_inside_a_block(device) {
        let zeros = |n: usize| "00".repeat(n);
        let scales = "01010101 00000000 01010101";
        let q4_k = |qs: String| format!("003c 0000 {scales} {qs}");
        let cases: &[Case<'_>] = &[
            (GgmlType::Mxfp4, format!("7f 21 9f {}", zeros(14)), &[(0, 0.5), (1, -6.0), (16, 1.0), (17, -0.5)]),
            (GgmlType::Mxfp4, format!("80 21 9f {}", zeros(14)), &[(0, 1.0), (1, -12.0), (16, 2.0), (17, -1.0)]),
            // The smallest scale: subnormal values, which must not be flushed.
            (GgmlType::Mxfp4, format!("00 01 {}", zeros(15)), &[(0, f32::from_bits(0x0020_0000))]),
            (GgmlType::Q5K, format!("003c 0000 {scales} 02 {} 01 {} {}", zeros(8), zeros(22), zeros(128)),
                &[(9, 16.0), (32, 16.0)]),
            (GgmlType::Q5K, format!("003c 0000 {scales} {} 21 {}", zeros(32), zeros(127)), &[(0, 1.0), (32, 2.0)]),
            (GgmlType::Q4K, q4_k(format!("21 {} 43 {}", zeros(95), zeros(31))), &[(0, 1.0), (32, 2.0), (192, 3.0), (224, 4.0)]),
            (GgmlType::Q4K, format!("003c 0000 010101c0 00000000 0101010f {} 10 {}", zeros(96), zeros(31)), &[(224, 63.0)]),
            // Sub-block scales of -2: 0 - 32 and 1 - 32, times -2; the rest have scale 0.
            (GgmlType::Q6K, format!("01 {} fe {} 003c", zeros(191), zeros(15)), &[(0, 62.0), (1, 64.0)]),
        ];
        for (ty, hex, expected) in cases {
            let file = unhex(hex);
            assert_eq!(file.len(), ty.block_bytes(), "{ty} {hex}");
            let cols = ty.block_elems() as u32;
            let w = Weights::new(device, *ty, [1, 1, cols], &file);
            let mut units = vec![0.0; (cols * cols) as usize];
            (0..cols as usize).for_each(|k| units[k * cols as usize + k] = 1.0);
            let input = Input::new(device, &units, cols);
            for form in forms(*ty) {
                let y = Output::new(device, cols as usize);
                input.run(device, form, &Matvec::new(w.matrix(), y.slice(), cols)).expect("matvec");
                let got: Vec<f32> = y.read(device);
                let named: Vec<usize> = expected.iter().map(|(i, _)| *i).collect();
                for &(i, want) in *expected {
                    let bound = if form == Activations::Plain { 0.0 } else { want.abs() * 1e-6 };
                    assert!((got[i] - want).abs() <= bound, "{ty} {form:?} {hex}: v{i} = {}, not {want}", got[i]);
                }
                if *ty != GgmlType::Q6K {
                    let rest = got.iter().enumerate().find(|(i, v)| !named.contains(i) && **v != 0.0);
                    assert_eq!(rest, None, "{ty} {form:?} {hex}");
                }
            }
        }
    }

    fn matvec_refuses_bad_shapes(device) {
        let (ty, cols, rows) = (GgmlType::Q8_0, 64, 4);
        let w = Weights::new(device, ty, [1, rows, cols], &[0; 8 * 34]);
        let experts = Weights::new(device, ty, [2, 2, cols], &[0; 8 * 34]);
        let f32s = Weights::new(device, GgmlType::F32, [1, rows, cols], &[0; 1024]);
        let input = Input::new(device, &[0.0; 128], cols);
        let y = device.alloc_zeroed::<f32>(8).expect("memory");
        let ids = device.alloc_zeroed::<u32>(2).expect("memory");
        let op = Matvec::new(w.matrix(), y.slice(), 2);
        let refused = |op: &Matvec<'_>| {
            let plain = input.run(device, Activations::Plain, op);
            let q8 = input.run(device, Activations::Q8x4, op);
            matches!((plain, q8), (Err(OpError::Operand { .. }), Err(OpError::Operand { .. })))
        };
        assert!(!refused(&op), "the shape that the others are changed from");
        assert!(refused(&Matvec { tokens: 3, ..op }), "no room in y, no rows of x");
        assert!(refused(&Matvec { y_stride: 3, ..op }), "rows of y overlap");
        assert!(refused(&Matvec { bias: Some(y.slice()), ..op }), "bias overlaps y");
        assert!(refused(&Matvec { w: experts.matrix(), ..op }), "experts without ids");
        let routed = Matvec { w: experts.matrix(), y_stride: 2, ..op };
        let routing = Experts { ids: ids.slice(), ids_stride: 1, n_used: 1, shared_x: true };
        assert!(!refused(&Matvec { experts: Some(routing), ..routed }), "as it should be");
        assert!(refused(&Matvec { experts: Some(Experts { n_used: 2, ..routing }), ..routed }), "ids overlap");
        assert!(refused(&Matvec { w: w.matrix(), tokens: 70_000, ..op }), "grid too high");
        let none = Matvec { tokens: 0, ..op };
        assert_eq!(input.run(device, Activations::Q8, &none).expect("nothing to do"), 0);
        let float = Matvec { w: f32s.matrix(), ..op };
        assert!(matches!(input.run(device, Activations::Q8, &float), Err(OpError::Type { .. })), "no such kernel");
    }
}

#[test]
fn matvec_lanes_fit_rows_and_blocks() {
    for &ty in GgmlType::ALL {
        for form in [Activations::Plain, Activations::Q8, Activations::Q8x4] {
            let shape = MatvecShape::new(ty, form);
            for chunks in (0..400).map(|n| (n + 1) * gpu_kernels::layout::block_chunks(ty)) {
                let lanes = 1 << MatvecShape::lanes_log2(ty, chunks);
                let most = if shares_by_block(ty) { MATVEC_BLOCK } else { 32 };
                assert!(lanes <= most && lanes >= gpu_kernels::layout::block_chunks(ty), "{ty} {chunks}");
                let idle = lanes * shape.steps > 2 * chunks.max(gpu_kernels::layout::block_chunks(ty) * shape.steps);
                assert!(!idle, "{ty} {chunks}: {lanes} lanes, {} steps", shape.steps);
            }
        }
    }
}
