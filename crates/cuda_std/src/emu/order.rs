//! The order in which lanes and blocks run.

/// The order in which the lanes of a block, and the blocks of a grid, get to run.
///
/// A GPU promises none. A kernel that needs one shows in a test that compares several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// The lowest index first.
    #[default]
    Forward,
    /// The highest index first.
    Backward,
    /// At random by this seed, anew after every barrier.
    Shuffled(u64),
}

impl Order {
    /// Fills `order` with a permutation of `0..order.len()`. `salt` tells shuffles of one seed apart.
    pub(super) fn permute(self, order: &mut [u32], salt: u64) {
        for (i, slot) in (0..).zip(order.iter_mut()) {
            *slot = i;
        }
        match self {
            Self::Forward => {}
            Self::Backward => order.reverse(),
            Self::Shuffled(seed) => shuffle(order, seed ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        }
    }
}

/// Fisher and Yates, with splitmix64 as the source of randomness.
fn shuffle(order: &mut [u32], mut state: u64) {
    for i in (1..order.len()).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        order.swap(i, (z % (i as u64 + 1)) as usize);
    }
}
