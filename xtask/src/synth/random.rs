//! Random numbers: the same for a seed on every machine and in every version.

use std::f32::consts::TAU;

/// SplitMix64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
#[derive(Debug)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Rng {
        // One step apart from the seed, so that seeds 0 and 1 have nothing in common.
        Rng(Rng(seed).next())
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// An index below `n`, which is far below 2^32: the bias of the plain product does not matter.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (((self.next() >> 32) * n as u64) >> 32) as usize
    }

    pub(super) fn bytes(&mut self, out: &mut [u8]) {
        for chunk in out.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }

    /// Uniform in `low..high`.
    pub(super) fn uniform(&mut self, low: f32, high: f32) -> f32 {
        let unit = (self.next() >> 40) as f32 / (1u64 << 24) as f32;
        low + (high - low) * unit
    }

    /// Normal with mean 0 and standard deviation 1, by Box and Muller.
    pub(super) fn normal(&mut self) -> f32 {
        let radius = (-2.0 * self.uniform(f32::EPSILON, 1.0).ln()).sqrt();
        radius * (TAU * self.uniform(0.0, 1.0)).cos()
    }
}
