//! Reproducible random numbers.

/// SplitMix64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
pub(crate) struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// An integer below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Uniform in −1 ..= 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 0x7f_ffff as f32 - 1.0
    }

    /// `n` numbers, uniform in −1 ..= 1.
    pub(crate) fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }

    /// `n` bytes.
    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }

    /// `0 .. n` in some order.
    pub(crate) fn permutation(&mut self, n: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, self.below(i as u64 + 1) as usize);
        }
        order
    }
}
