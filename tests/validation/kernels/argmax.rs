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
fn a_nan_never_wins() {
    fn checks<D: Device>(device: &D) {
        let mut logits = vec![f32::NAN; 700];
        assert_eq!(argmax(device, &logits, 700), [0]);
        logits[611] = -3e38;
        assert_eq!(argmax(device, &logits, 700), [611]);
        assert_eq!(argmax(device, &vec![f32::NEG_INFINITY; 700], 700), [0]);
    }
    on_devices!(checks);
}
