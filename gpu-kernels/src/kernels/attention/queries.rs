//! Where [`decode`](super::decode)'s queries come from: ready, or [`fresh`](super::fresh) from their projections.

use cuda_std::prelude::*;

use super::decode::fragments;
#[cfg(doc)]
use super::fresh::Fresh;
use super::head::{Kind, Vecs};

/// What a block has to do.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) row: u32,
    /// The position of the row.
    pub(super) pos: u32,
    pub(super) first_head: u32,
    pub(super) heads: u32,
    pub(super) head_kv: u32,
    /// The sequence's row of the page table.
    pub(super) table: *const u32,
    /// Whether the newest key is among the block's.
    pub(super) newest: bool,
}

/// Where a block's queries come from, of heads of `16·K`.
pub(super) trait Queries<const K: usize> {
    /// Whether only the queries and each row's newest key and value are the work of the grid ahead: then a block finds its
    /// place before that has ended.
    const ALONE: bool;
    /// What is loaded that the grid ahead does not make.
    type Early;
    /// What is loaded of its work.
    type Fetched;

    /// Finds and loads what hangs on nothing that the grid ahead makes; `mine` is the warp's shared memory, as in `ready`.
    ///
    /// # Safety
    /// As the kernel.
    unsafe fn early(&self, at: Place, mine: Shared<f32>) -> Self::Early;

    /// Starts to load of its work.
    ///
    /// # Safety
    /// As the kernel.
    unsafe fn fetch(&self, at: Place, early: &Self::Early) -> Self::Fetched;

    /// The queries' fragments. `scratch` gives each warp's shared memory, [`Fresh::bytes_a_warp`]; `keep` is given the
    /// newest key or value, by a warp, when all copies that the lanes started have arrived.
    ///
    /// # Safety
    /// The whole block comes here, and nobody uses the shared memory; otherwise as the kernel.
    unsafe fn ready(
        &self,
        at: Place,
        loaded: (Self::Early, Self::Fetched),
        scratch: impl Fn(u32) -> Shared<f32>,
        keep: impl Fn(Kind, &Vecs),
        scale: f32,
    ) -> [[u32; 2]; K];
}

/// Queries that are ready, `[rows, n_head, 16·K]`.
pub(super) struct Ready {
    pub(super) q: *const f32,
    pub(super) n_head: u32,
}

impl<const K: usize> Queries<K> for Ready {
    const ALONE: bool = false;
    type Early = ();
    type Fetched = ();

    #[inline(always)]
    unsafe fn early(&self, _at: Place, _mine: Shared<f32>) {}

    #[inline(always)]
    unsafe fn fetch(&self, _at: Place, (): &()) {}

    #[inline(always)]
    unsafe fn ready(
        &self,
        at: Place,
        _loaded: ((), ()),
        _scratch: impl Fn(u32) -> Shared<f32>,
        _keep: impl Fn(Kind, &Vecs),
        scale: f32,
    ) -> [[u32; 2]; K] {
        let q = self.q.wrapping_add((at.row as usize * self.n_head as usize + at.first_head as usize) * 16 * K);
        // SAFETY: the element is in the row of a head that is there.
        fragments(|head, dim| unsafe { ld(q.add((head as usize * 16 * K) + dim as usize).cast()) }, at.heads, scale)
    }
}
