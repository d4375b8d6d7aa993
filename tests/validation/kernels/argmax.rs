//! The largest logit.

use host::gpu::ops::{self, Parts};
use host::gpu::{Device, ops::n_part};

use super::{Output, Random, input, on_devices};

fn argmax<D: Device>(device: &D, logits: &[f32], n: usize) -> Vec<u32> {
    let rows = logits.len() / n;
    let parts = rows * n_part(n as u32) as usize;
    let (value, index) = (Output::<D, f32>::new(device, parts), Output::<D, u32>::new(device, parts));
    let out = Output::new(device, rows);
    let parts = Parts { value: value.slice(), index: index.slice() };
    ops::argmax(device, input(device, logits).slice(), parts, out.slice(), n as u32).unwrap();
    value.read(device);
    index.read(device);
    out.read(device)
}

#[test]
fn the_largest_wins_and_the_lowest_index_on_a_tie() {
    fn checks<D: Device>(device: &D) {
        for n in [1usize, 31, 32, 33, 255, 256, 257, 1025, 5000] {
            let mut random = Random::new(n as u64);
            let rows = 3;
            let mut logits = random.units(rows * n);
            for row in 0..rows {
                // Two equal peaks anywhere.
                for _ in 0..2 {
                    logits[row * n + random.below(n as u64) as usize] = 2.0;
                }
            }
            let expected: Vec<u32> =
                logits.chunks(n).map(|row| row.iter().position(|&x| x == 2.0).unwrap() as u32).collect();
            assert_eq!(argmax(device, &logits, n), expected, "n = {n}");
            assert_eq!(argmax(device, &vec![-1.0; n], n), [0], "all equal, n = {n}");
        }
    }
    on_devices!(checks);
}

#[test]
fn a_broken_row_has_no_index() {
    fn checks<D: Device>(device: &D) {
        for broken in [f32::NAN, -f32::NAN, f32::INFINITY] {
            for at in [0, 255, 611, 699] {
                let mut logits = vec![-1.0; 3 * 700];
                logits[700 + at] = broken;
                logits[2 * 700 + 5] = 3e38;
                assert_eq!(argmax(device, &logits, 700), [0, u32::MAX, 5], "{broken} at {at}");
            }
        }
        assert_eq!(argmax(device, &vec![f32::NEG_INFINITY; 700], 700), [0]);
    }
    on_devices!(checks);
}

#[test]
fn padding_behind_a_row_does_not_count() {
    fn checks<D: Device>(device: &D) {
        // Rows of 40, of which 33 are tokens.
        let logits: Vec<f32> = (0..3 * 40).map(|i| if i % 40 < 33 { (i * 7 % 31) as f32 } else { f32::NAN }).collect();
        let parts = (Output::<D, f32>::new(device, 3), Output::<D, u32>::new(device, 3));
        let out = Output::<D, u32>::new(device, 3);
        let room = Parts { value: parts.0.slice(), index: parts.1.slice() };
        ops::argmax(device, input(device, &logits).slice(), room, out.slice(), 33).unwrap();
        let row = |row: &[f32]| (0..33).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32;
        let expected: Vec<u32> = logits.chunks(40).map(row).collect();
        assert_eq!(out.read(device), expected);
    }
    on_devices!(checks);
}
