//! Several products of the same activations in one launch.

use gpu_kernels::blocks::GgmlType;
use gpu_kernels::params::Activations;
use host::gpu::ops::{Matvec, OpError, Product, common_type, matvec, matvecs, takes_q8};

use super::formats::{dequantize, random_blocks};
use super::matvec::{Input, dot, tolerance};
use super::{Output, Random, Weights, assert_close, assert_same_bits, devices};

/// Rows of each product, and whether it is F32; numbers that leave blocks partly empty.
const PARTS: [(u32, bool); 4] = [(5, true), (37, false), (70, false), (1, true)];

devices! {
    /// Against the definition, and to the bits of one product a launch.
    fn matvecs_are_the_products_one_by_one(device) {
        let mut random = Random::new(14);
        let types: Vec<GgmlType> = GgmlType::ALL.iter().copied().filter(|ty| takes_q8(*ty)).collect();
        for (i, &quantised) in types.iter().enumerate() {
            let cols = [256u32, 512, 2304][i % 3];
            for (tokens, n_parts) in [(1u32, 4usize), (1, 2), (3, 4), (6, 3)] {
                // From the end, so that F32 comes first and last.
                let parts: Vec<_> = PARTS[4 - n_parts..]
                    .iter()
                    .map(|&(rows, plain)| {
                        let ty = if plain { GgmlType::F32 } else { quantised };
                        let file = random_blocks(&mut random, ty, (rows * cols) as usize);
                        let values = dequantize(ty, &file);
                        (Weights::new(device, ty, [1, rows, cols], &file), values, rows)
                    })
                    .collect();
                let input = Input::new(device, &random.units((tokens * cols) as usize), cols);
                let outputs: Vec<_> =
                    parts.iter().map(|(_, _, rows)| Output::<_, f32>::new(device, (tokens * rows) as usize)).collect();
                let products: Vec<_> = parts
                    .iter()
                    .zip(&outputs)
                    .map(|((w, _, rows), y)| Product { w: w.matrix(), y: y.slice(), y_stride: *rows })
                    .collect();
                matvecs(device, &products, input.x.slice(), input.q8(), tokens, true).expect("matvecs");
                for (((w, values, rows), y), product) in parts.iter().zip(&outputs).zip(&products) {
                    let got = y.read(device);
                    let ty = w.matrix().ty();
                    let form = if ty == GgmlType::F32 { Activations::Plain } else { Activations::Q8 };
                    let x = input.values(form).chunks_exact(cols as usize);
                    let dots: Vec<_> =
                        x.flat_map(|x| values.chunks_exact(cols as usize).map(move |w| dot(w, x))).collect();
                    let want: Vec<f64> = dots.iter().map(|(sum, _)| *sum).collect();
                    let what = format!("matvecs {ty} with {quantised}, {tokens} x {rows} x {cols}");
                    assert_close(&what, &got, &want, |i| tolerance(cols) * dots[i].1);

                    let alone = Output::<_, f32>::new(device, got.len());
                    let op = Matvec::new(product.w, alone.slice(), tokens);
                    let four = tokens > 1 && form == Activations::Q8;
                    let form = if four { Activations::Q8x4 } else { form };
                    input.run(device, form, &op).expect("matvec");
                    assert_same_bits(&what, &got, &alone.read(device));
                }
            }
        }
    }

    fn matvecs_refuses_what_one_launch_cannot_do(device) {
        let (cols, rows) = (64, 4);
        let of = |ty: GgmlType, cols: u32| {
            Weights::new(device, ty, [1, rows, cols], &vec![0; (rows * cols) as usize / ty.block_elems() * ty.block_bytes()])
        };
        let (q8_0, q4_0, f32s, f16s, long) = (
            of(GgmlType::Q8_0, cols), of(GgmlType::Q4_0, cols), of(GgmlType::F32, cols), of(GgmlType::F16, cols),
            of(GgmlType::Q8_0, 128),
        );
        let input = Input::new(device, &[0.0; 128], cols);
        let y = device.alloc_zeroed::<f32>(64).expect("memory");
        let part = |w, i: usize| Product { w, y: y.slice().part(8 * i..8 * i + 8).expect("inside"), y_stride: 4 };
        let run = |products: &[Product<'_>], tokens| matvecs(device, products, input.x.slice(), input.q8(), tokens, false);
        let operand = |result| matches!(result, Err(OpError::Operand { .. }));
        let ty = |result| matches!(result, Err(OpError::Type { .. }));
        let (a, b) = (part(q8_0.matrix(), 0), part(f32s.matrix(), 1));
        run(&[a, b], 2).expect("the products that the others are changed from");
        assert_eq!(run(&[a, b], 0).expect("nothing to do"), 0);
        assert!(operand(run(&[], 1)), "none");
        assert!(operand(run(&[a, b, b, b, b], 1)), "too many");
        assert!(operand(run(&[a, a], 1)), "results overlap");
        assert!(operand(run(&[a, b], 3)), "no room in y, no rows of x");
        assert!(operand(run(&[a, part(long.matrix(), 1)], 1)), "other columns");
        assert!(operand(run(&[Product { y: input.x.slice(), ..a }], 1)), "y overlaps x");
        assert!(operand(run(&[Product { y_stride: 3, ..a }], 2)), "rows of y overlap");
        assert!(ty(run(&[a, part(q4_0.matrix(), 1)], 1)), "two quantised types");
        assert!(ty(run(&[a, part(f16s.matrix(), 1)], 1)), "F16");
        assert!(ty(run(&[b], 1)), "no quantised type");
        assert_eq!(common_type([GgmlType::F32, GgmlType::Q8_0, GgmlType::Q8_0]), Some(GgmlType::Q8_0));
        // What the products one by one refuse is no measure of these, but what they take is.
        let alone = Matvec::new(f32s.matrix(), y.slice(), 2);
        matvec(device, &alone, input.x.slice(), cols).expect("F32 alone");
    }
}
