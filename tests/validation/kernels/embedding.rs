//! Embedding rows against golden values and the formats' definitions.

use gpu_kernels::blocks::GgmlType;
use host::gpu::ops::{OpError, embedding};

use super::formats::{dequantize, golden, random_blocks};
use super::{Output, Random, Weights, devices};

devices! {
    fn embedding_gives_golden_values_bit_for_bit(device) {
        for (ty, file, values) in golden() {
            let cols = ty.block_elems().max(32) as u32;
            let rows = values.len() as u32 / cols;
            let w = Weights::new(device, ty, [1, rows, cols], &file);
            let tokens: Vec<u32> = (0..rows).rev().collect();
            let ids = device.alloc_from(&tokens).expect("memory");
            let y = Output::new(device, values.len());
            embedding(device, w.matrix(), ids.slice(), y.slice(), cols).expect("embedding");
            let got: Vec<f32> = y.read(device);
            for (t, &token) in tokens.iter().enumerate() {
                let (got, want) = (&got[t * cols as usize..], &values[token as usize * cols as usize..]);
                for i in 0..cols as usize {
                    assert_eq!(got[i], want[i], "{ty}: element {i} of row {token}");
                }
            }
        }
    }

    fn embedding_of_long_rows_with_a_stride(device) {
        let mut random = Random::new(3);
        for &ty in GgmlType::ALL {
            // More chunks than a block has lanes, for the float types.
            let (rows, cols, stride) = (5, 2304, 2308);
            let file = random_blocks(&mut random, ty, rows * cols);
            let want = dequantize(ty, &file);
            let w = Weights::new(device, ty, [1, rows as u32, cols as u32], &file);
            let tokens = [4, 0, 4, 2, 7];
            let ids = device.alloc_from(&tokens).expect("memory");
            let y = Output::new(device, tokens.len() * stride);
            embedding(device, w.matrix(), ids.slice(), y.slice(), stride as u32).expect("embedding");
            let got: Vec<f32> = y.read(device);
            for (t, &token) in tokens.iter().enumerate() {
                // A token id past the table is read as its last row.
                let row = (token as usize).min(rows - 1);
                for i in 0..cols {
                    let (got, want) = (f64::from(got[t * stride + i]), want[row * cols + i]);
                    // Two roundings: of the scale times the integer, and of the sum.
                    assert!((got - want.sum()).abs() <= 2.0 * want.size() * 2f64.powi(-24), "{ty}: {i} of {token}: {got}");
                }
                assert!(got[t * stride + cols..(t + 1) * stride].iter().all(|x| x.is_nan()), "{ty}: wrote past a row");
            }
        }
    }

    fn embedding_refuses_bad_shapes(device) {
        let w = Weights::new(device, GgmlType::Q8_0, [1, 2, 32], &[0; 68]);
        let tokens = device.alloc_from(&[0u32, 1]).expect("memory");
        let y = device.alloc_zeroed::<f32>(64).expect("memory");
        let refused = |result| matches!(result, Err(OpError::Operand { .. }));
        assert!(refused(embedding(device, w.matrix(), tokens.slice(), y.slice(), 36)), "y too small");
        assert!(refused(embedding(device, w.matrix(), tokens.slice(), y.slice(), 28)), "rows overlap");
        assert!(refused(embedding(device, w.matrix(), tokens.slice(), y.part(1..).expect("inside"), 32)), "unaligned");
        assert!(embedding(device, w.matrix(), tokens.part(..0).expect("inside"), y.slice(), 32).is_ok(), "no tokens");
        assert!(embedding(device, w.matrix(), tokens.slice(), y.slice(), 32).is_ok());
    }
}
