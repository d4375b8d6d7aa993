//! Weight formats as kernels see them: one trait, one impl a type.
//!
//! A lane works on *chunks*. Chunk `c` of a row is the `c`-th 16 bytes of the row in plane 0, with what
//! the other planes add to them; neighbouring lanes take neighbouring chunks, so that a warp's load is
//! 512 consecutive bytes. A chunk's elements are one or two *runs* of consecutive elements: a format
//! that packs two values in a byte keeps them 16 or 32 elements apart, and low and high nibbles are a
//! run each.
//!
//! [`Format::load`] only issues loads, so that a kernel can have several in flight, and can issue them
//! before it waits for the grid that makes its activations.

mod float;
mod legacy;
mod mxfp4;
mod q4_k;
mod q5_k;
mod q6_k;
mod q8_0;
pub(crate) mod wide;

pub use float::{Bf16, F16, F32};
pub use legacy::{Q4_0, Q4_1, Q5_0, Q5_1};
pub use mxfp4::Mxfp4;
pub use q4_k::Q4K;
pub use q5_k::Q5K;
pub(in crate::kernels) use q5_k::pack as pack_q5_k;
pub use q6_k::Q6K;
pub use q8_0::Q8_0;
pub use wide::FormatWide;

use cuda_std::prelude::*;

use crate::blocks::GgmlType;
use crate::layout::{MAX_PLANES, block_chunks, chunk_elems, plane_bytes};

/// A weight type in its planar device layout ([`crate::layout`]).
///
/// Where a method takes a `phase`, that is the chunk's place in its block, `chunk % BLOCK_CHUNKS`. A
/// lane that steps by a multiple of a block's chunks keeps its phase, and what depends on it is
/// computed once.
pub trait Format {
    /// The type.
    const TYPE: GgmlType;
    /// Runs of consecutive elements in a chunk: 1 or 2.
    const RUNS: u32;
    /// Elements from the start of the first run to the start of the second.
    const RUN_DISTANCE: u32;
    /// Chunks in a block.
    const BLOCK_CHUNKS: u32 = block_chunks(Self::TYPE);
    /// Elements in a chunk.
    const CHUNK_ELEMS: u32 = chunk_elems(Self::TYPE);
    /// Elements in a run.
    const RUN_ELEMS: u32 = Self::CHUNK_ELEMS / Self::RUNS;

    /// What one lane holds of a chunk: the bytes, not yet unpacked.
    type Raw: Copy;

    /// Loads chunk `chunk` of a row.
    ///
    /// # Safety
    /// `row` came from [`Row::new`] for a tensor of this type, and the row has more than `chunk` chunks.
    unsafe fn load(row: &Row, chunk: u32) -> Self::Raw;

    /// The element of the row at which a chunk's first run starts.
    fn start(chunk: u32) -> u32;

    /// Elements `4·I ..+4` of the chunk, its first run before its second.
    fn quad<const I: u32>(raw: &Self::Raw, phase: u32) -> [f32; 4];

    /// Where quad `I` starts, counted from the start of the chunk's first run.
    #[inline(always)]
    fn quad_offset(quad: u32) -> u32 {
        4 * quad % Self::RUN_ELEMS + 4 * quad / Self::RUN_ELEMS * Self::RUN_DISTANCE
    }
}

/// A format of small integers, whose product with 8-bit activations is integer arithmetic.
pub trait FormatQ8: Format {
    /// `Σ w·x` over the chunk. `x` holds the activations of its runs; where there is one run, `x[1]` is
    /// not to be read.
    fn dot_q8(raw: &Self::Raw, x: &[Q8Run; 2], phase: u32) -> f32;
}

/// A format whose chunks a warp holds together: what neighbouring lanes have in common is held once, by parts.
///
/// So more weights are under way in the same registers. As many neighbouring lanes as a block has chunks take one each;
/// `phase` is a lane's place among them.
pub trait FormatHeld: FormatQ8 {
    /// What a lane holds of a chunk.
    type Held: Copy;

    /// Loads this lane's part of chunk `chunk` of a row.
    ///
    /// # Safety
    /// As [`Format::load`].
    unsafe fn hold(row: &Row, chunk: u32, phase: u32) -> Self::Held;

    /// A word that takes part of each of the loads: for [`after`].
    fn word(held: &Self::Held) -> u32;

    /// The chunk, from the lanes' parts.
    ///
    /// # Safety
    /// Every lane of the warp comes here, and the lanes of a block hold parts of the same one.
    unsafe fn gather(held: &Self::Held, phase: u32) -> Self::Raw;
}

/// [`FormatHeld`] where a lane holds all of a chunk.
macro_rules! held_whole {
    ($($name:ty, |$held:ident| $word:expr;)+) => {$(
        impl FormatHeld for $name {
            type Held = Self::Raw;

            #[inline(always)]
            unsafe fn hold(row: &Row, chunk: u32, _phase: u32) -> Self::Raw {
                // SAFETY: the caller's promise.
                unsafe { Self::load(row, chunk) }
            }

            #[inline(always)]
            fn word($held: &Self::Raw) -> u32 {
                $word
            }

            #[inline(always)]
            unsafe fn gather(held: &Self::Raw, _phase: u32) -> Self::Raw {
                *held
            }
        }
    )+};
}
use held_whole;

/// `n`, but not before `word` has been loaded. `zero` is 0, which neither the compiler nor the assembler sees.
#[inline(always)]
pub(super) fn after(word: u32, zero: u32, n: u32) -> u32 {
    int8::dp4a(word.cast_signed(), zero.cast_signed(), n.cast_signed()).cast_unsigned()
}

/// A format of small integers as the tensor cores take it: `v = scale·q − min`, `q` a signed byte.
///
/// A scale is exact in f32 with at least two bits to spare: it is an f16, or one times an integer of up to
/// eight bits, or a power of two.
pub trait FormatTile: FormatQ8 {
    /// Consecutive elements that share scale and minimum: 16 or 32.
    const GROUP_ELEMS: u32 = 32;
    /// Whether there are minimums that are not 0.
    const HAS_MIN: bool = false;

    /// `q` of a chunk's runs; where there is one run, the second is not to be read.
    fn integers(raw: &Self::Raw, phase: u32) -> [[u32; 4]; 2];

    /// Scale and minimum of one of a chunk's runs.
    fn scale(raw: &Self::Raw, phase: u32, run: usize) -> [f32; 2];
}

/// Sixteen quantised activations: `x[i] = d·qs[i]`, and their sum `s = d·Σ qs[i]`.
#[derive(Clone, Copy)]
pub struct Q8Run {
    /// The integers, four to a word.
    pub qs: [u32; 4],
    /// Their scale.
    pub d: f32,
    /// Their sum, scaled; formats with a minimum multiply it by that.
    pub s: f32,
}

/// Where one row of a weight starts in each plane.
#[derive(Clone, Copy)]
pub struct Row {
    planes: [*const u8; MAX_PLANES],
}

impl Row {
    /// Row `row` (counted over all experts) of the tensor at `w`, whose planes are at `offsets`.
    ///
    /// # Safety
    /// The tensor has such a row, of `chunks` chunks, and lies in one allocation.
    #[inline(always)]
    pub unsafe fn new<F: Format>(w: *const u8, offsets: &[u64; MAX_PLANES], row: u64, chunks: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::from_block::<F>(w, offsets, row * u64::from(chunks / F::BLOCK_CHUNKS)) }
    }

    /// What follows from block `block` (counted over the tensor) on, as a row.
    ///
    /// # Safety
    /// As [`Row::new`]: the tensor has such a block.
    #[inline(always)]
    pub unsafe fn from_block<F: Format>(w: *const u8, offsets: &[u64; MAX_PLANES], block: u64) -> Self {
        let bytes = const { plane_bytes(F::TYPE) };
        // SAFETY: the offset is that of a block of the tensor.
        let at = |i: usize| unsafe { w.add((offsets[i] + block * bytes[i]) as usize) };
        Self { planes: [at(0), at(1), at(2), at(3)] }
    }

    /// Loads item `index` of plane `P`, seen as items of type `T`, and marks it as not to be kept: one
    /// matrix is read once a step, and the activations need the cache.
    ///
    /// # Safety
    /// The row has such an item in that plane.
    #[inline(always)]
    pub unsafe fn stream<T: Pod, const P: usize>(&self, index: u32) -> T {
        // SAFETY: the caller's promise; planes are aligned for `T` because blocks are its multiples.
        unsafe { mem::ld_cs(self.planes[P].cast::<T>().add(index as usize)) }
    }

    /// As [`stream`](Self::stream), for items of one or two bytes, which have no hinted loads.
    ///
    /// # Safety
    /// The row has such an item in that plane.
    #[inline(always)]
    pub unsafe fn load<T: Pod, const P: usize>(&self, index: u32) -> T {
        // SAFETY: the caller's promise; as above.
        unsafe { ld(self.planes[P].cast::<T>().add(index as usize)) }
    }
}

/// The low nibbles of four bytes, as bytes.
#[inline(always)]
pub(crate) fn low_nibbles(word: u32) -> u32 {
    word & 0x0f0f_0f0f
}

/// The high nibbles of four bytes, as bytes.
#[inline(always)]
pub(crate) fn high_nibbles(word: u32) -> u32 {
    (word >> 4) & 0x0f0f_0f0f
}

/// The high nibbles where they are: sixteen times their value, in unsigned bytes. One shift less.
#[inline(always)]
pub(crate) fn high_nibbles_16(word: u32) -> u32 {
    word & 0xf0f0_f0f0
}

/// Subtracts `offset`, at most 128, from four bytes that are less than 128. No byte borrows from the next: with its
/// top bit set it is large enough.
#[inline(always)]
pub(crate) fn centred(word: u32, offset: u8) -> u32 {
    const TOP: u32 = 0x8080_8080;
    ((word | TOP) - u32::from(offset) * 0x0101_0101) ^ TOP
}

/// One of two words, without a branch.
#[inline(always)]
pub(crate) fn select(first: bool, a: u32, b: u32) -> u32 {
    core::hint::select_unpredictable(first, a, b)
}

/// The four unsigned bytes of a word.
#[inline(always)]
pub(crate) fn unsigned_bytes(word: u32) -> [f32; 4] {
    [word & 0xff, word >> 8 & 0xff, word >> 16 & 0xff, word >> 24].map(|byte| byte as f32)
}

/// The four signed bytes of a word.
#[inline(always)]
pub(crate) fn signed_bytes(word: u32) -> [f32; 4] {
    word.to_le_bytes().map(|byte| f32::from(byte.cast_signed()))
}

/// 1.5·2²³: an f32 whose neighbours up to 2²² away are the integers. Its bits and its value grow by one together.
pub(in crate::kernels) const MAGIC: f32 = 12_582_912.0;

/// Sixteen products of signed bytes, summed: `Σ a[i]·b[i]`, exactly. The conversion to f32 is saved, as the sum starts at
/// the bits of [`MAGIC`].
#[inline(always)]
pub(crate) fn dot16(a: [u32; 4], b: &[u32; 4]) -> f32 {
    let mut sum = MAGIC.to_bits().cast_signed();
    for i in 0..4 {
        sum = int8::dp4a(a[i].cast_signed(), b[i].cast_signed(), sum);
    }
    f32::from_bits(sum.cast_unsigned()) - MAGIC
}

/// Sixteen products of unsigned bytes `a` and signed bytes `b`, summed likewise.
#[inline(always)]
pub(crate) fn dot16_unsigned(a: [u32; 4], b: &[u32; 4]) -> f32 {
    let mut sum = MAGIC.to_bits().cast_signed();
    for i in 0..4 {
        sum = int8::dp4a_us(a[i], b[i].cast_signed(), sum);
    }
    f32::from_bits(sum.cast_unsigned()) - MAGIC
}

/// Byte `i` of a word as f32: put into the low bits of 2²³.
#[inline(always)]
pub(crate) fn byte(word: u32, i: u32) -> f32 {
    const TWO_23: f32 = 8_388_608.0;
    f32::from_bits(int8::prmt(word, TWO_23.to_bits(), 0x7650 | i)) - TWO_23
}
