//! Warp collectives: every lane of the mask brings some words, the last one to come does the exchange for
//! all of them, and each goes on with its own result.

use super::fault::{What, raise};
use crate::warp::ShuffleMode;
use core::cell::{Cell, RefCell};
use core::panic::Location;

/// The words that a lane may bring or get.
const WORDS: usize = 32;

/// What the lanes of a mask do together. Lanes that do different things do not meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collective {
    Sync,
    ShuffleXor,
    ShuffleDown,
    ShuffleUp,
    ShuffleIdx,
    Vote,
    ReduceMax,
    ReduceMin,
    MmaS8,
    MmaF16,
    MmaBf16,
    LdMatrix,
    LdMatrixTrans,
    Wgmma,
}

impl Collective {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync_warp",
            Self::ShuffleXor => "shuffle_xor",
            Self::ShuffleDown => "shuffle_down",
            Self::ShuffleUp => "shuffle_up",
            Self::ShuffleIdx => "shuffle_idx",
            Self::Vote => "vote",
            Self::ReduceMax => "redux.max",
            Self::ReduceMin => "redux.min",
            Self::MmaS8 => "mma.m16n8k32.s8",
            Self::MmaF16 => "mma.m16n8k16.f16",
            Self::MmaBf16 => "mma.m16n8k16.bf16",
            Self::LdMatrix => "ldmatrix",
            Self::LdMatrixTrans => "ldmatrix.trans",
            Self::Wgmma => "wgmma",
        }
    }

    /// How the shuffles find their source. Collectives that are none shuffle to themselves.
    pub(crate) fn shuffle_mode(self) -> ShuffleMode {
        match self {
            Self::ShuffleDown => ShuffleMode::Down,
            Self::ShuffleUp => ShuffleMode::Up,
            Self::ShuffleIdx => ShuffleMode::Idx,
            _ => ShuffleMode::Xor,
        }
    }
}

/// A warp of the running block.
pub(super) struct Warp {
    /// Counts the warp's `sync_warp`s.
    pub(super) epoch: Cell<u32>,
    /// What the lanes bring, and what they get.
    brought: RefCell<[[u32; WORDS]; 32]>,
    results: RefCell<[[u32; WORDS]; 32]>,
}

impl Warp {
    pub(super) fn new() -> Self {
        let words = || RefCell::new([[0; WORDS]; 32]);
        Self { epoch: Cell::new(0), brought: words(), results: words() }
    }

    pub(super) fn bring<const N: usize>(&self, lane: u32, words: [u32; N]) {
        self.brought.borrow_mut()[lane as usize][..N].copy_from_slice(&words);
    }

    pub(super) fn take<const M: usize>(&self, lane: u32) -> [u32; M] {
        let results = self.results.borrow();
        core::array::from_fn(|i| results[lane as usize][i])
    }

    /// Works out each lane's result.
    pub(super) fn exchange<const N: usize, const M: usize>(
        &self,
        kind: Collective,
        mask: u32,
        at: &'static Location<'static>,
        result: impl Fn(&Given<'_, N>, u32) -> [u32; M],
    ) {
        let (brought, mut results) = (self.brought.borrow(), self.results.borrow_mut());
        let given = Given { words: &brought, kind, mask, at };
        for lane in lanes(mask) {
            results[lane as usize][..M].copy_from_slice(&result(&given, lane));
        }
    }
}

/// The lanes of a mask.
pub(super) fn lanes(mask: u32) -> impl Iterator<Item = u32> {
    (0..32).filter(move |lane| mask >> lane & 1 != 0)
}

/// What the lanes brought: `N` words each.
pub(crate) struct Given<'a, const N: usize> {
    words: &'a [[u32; WORDS]; 32],
    kind: Collective,
    mask: u32,
    at: &'static Location<'static>,
}

impl<const N: usize> Given<'_, N> {
    /// The words of a lane that takes part.
    pub(crate) fn of(&self, lane: u32) -> [u32; N] {
        core::array::from_fn(|i| self.words[lane as usize][i])
    }

    /// The words of the lane that a shuffle reads from, which is a fault if that one takes no part.
    pub(crate) fn from(&self, from: u32) -> [u32; N] {
        if self.mask >> from & 1 == 0 {
            raise(self.at, What::OutsideMask { collective: self.kind.name(), mask: self.mask, lane: from });
        }
        self.of(from)
    }
}
