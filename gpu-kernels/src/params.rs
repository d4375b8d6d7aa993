//! Scalar parameters and launch geometry, shared by kernels and launchers.
//!
//! Pointers are passed as arguments of their own (inside a struct the compiler loses that they are
//! global memory); everything else travels in one of these structs.

use bytemuck::{Pod, Zeroable};

use crate::blocks::GgmlType;
use crate::layout::{MAX_PLANES, block_chunks};

/// Lanes of a warp.
pub const WARP: u32 = 32;

/// Lanes of a matvec block. Small blocks: 512 rows are then 128 blocks, which reach nearly every
/// multiprocessor of an H200 (132); bigger grids don't care.
pub const MATVEC_BLOCK: u32 = 128;
/// Lanes of a block in the elementwise kernels of this crate (repack, embedding, quantize_q8).
pub const FLAT_BLOCK: u32 = 256;
/// Elements that one lane of `quantize_q8` takes.
pub const QUANTIZE_Q8_LANE_ELEMS: u32 = 4;
/// Elements that share a scale and a sum in quantised activations.
pub const Q8_BLOCK: u32 = 16;
/// What the elements of a quantised row are a multiple of: a block of most weight types.
pub const Q8_COLS: u32 = 2 * Q8_BLOCK;

/// Lanes of a `read_sweep` block.
pub const READ_SWEEP_BLOCK: u32 = 256;
/// 16-byte loads of each of its lanes.
pub const READ_SWEEP_LOADS: u32 = 8;

/// What a matvec kernel multiplies weights with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// f32.
    Plain,
    /// 8-bit integers with scales.
    Q8,
    /// The same, four tokens at a time.
    Q8x4,
}

impl Activations {
    /// Tokens of one block.
    pub const fn tokens(self) -> u32 {
        match self {
            Activations::Plain | Activations::Q8 => 1,
            Activations::Q8x4 => 4,
        }
    }
}

/// How a matvec kernel is unrolled: `rows·steps` 16-byte loads in flight a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatvecShape {
    /// Rows that one group of lanes computes together, reading the activations once for all of them.
    pub rows: u32,
    /// Chunks of each row that a lane loads before it uses the first.
    pub steps: u32,
}

impl MatvecShape {
    /// The unrolling for a weight type.
    ///
    /// At 2048 columns a lane has four chunks of a Q8_0 row and two of a 4-bit one. A 4-bit chunk needs
    /// twice the activations for the same bytes and more arithmetic, so those types share activations
    /// between rows; unpacked to floats they take too many registers for more than two. With four tokens
    /// the sums and unpacked weights take their place.
    pub const fn new(ty: GgmlType, x: Activations) -> Self {
        match (ty, x) {
            (GgmlType::Q8_0, Activations::Q8x4) => Self { rows: 2, steps: 2 },
            (GgmlType::Q8_0 | GgmlType::F16 | GgmlType::Bf16 | GgmlType::F32, _) => Self { rows: 1, steps: 4 },
            (_, Activations::Plain | Activations::Q8x4) => Self { rows: 2, steps: 1 },
            (GgmlType::Q4K, Activations::Q8) => Self { rows: 4, steps: 2 },
            (_, Activations::Q8) => Self { rows: 4, steps: 1 },
        }
    }

    /// The unrolling where a lane goes on from row to row with the next step's weights in flight
    /// ([`sweep`](crate::kernels::matvec)), which takes twice the registers for them.
    pub const fn swept(ty: GgmlType) -> Self {
        match ty {
            GgmlType::Q8_0 => Self { rows: 2, steps: 4 },
            GgmlType::Q4K | GgmlType::Mxfp4 => Self { rows: 4, steps: 1 },
            _ => Self { rows: 2, steps: 2 },
        }
    }

    /// As [`swept`](Self::swept), for matrices that together have few rows for each warp: what counts then is that warps have
    /// as many. The 6144 rows of an attention layer with 4096 columns are one item of three rows for each warp of 132
    /// multiprocessors, and of two rows they would be two for some and one for the others.
    pub const fn normed(ty: GgmlType) -> Self {
        match ty {
            GgmlType::Q5K => Self { rows: 3, steps: 1 },
            _ => Self::swept(ty),
        }
    }

    /// `log2` of the lanes that share a row of `chunks` chunks: the whole warp where the row fills it,
    /// fewer for shorter rows, so that lanes are not idle; never less than a block's chunks, see
    /// [`Format`](crate::kernels::format::Format). Matrices in F32 have few rows (routers, gates), of which a warp
    /// would take several steps: there up to a whole block shares a row.
    ///
    /// The same whatever it is multiplied with: a token's sums then have the same order, and its result the same bits,
    /// alone and beside others.
    pub const fn lanes_log2(ty: GgmlType, chunks: u32) -> u32 {
        let lanes = chunks.div_ceil(Self::new(ty, Activations::Q8).steps);
        let block = block_chunks(ty);
        let lanes = if lanes < block { block } else { lanes };
        let most = if shares_by_block(ty) { MATVEC_BLOCK } else { WARP };
        if lanes >= most { most.ilog2() } else { lanes.next_power_of_two().ilog2() }
    }

    /// Rows that one block computes.
    pub const fn rows_per_block(self, ty: GgmlType, chunks: u32) -> u32 {
        (MATVEC_BLOCK >> Self::lanes_log2(ty, chunks)) * self.rows
    }
}

/// Whether more lanes than a warp may share a row of this type. Their sums then meet in shared memory.
pub const fn shares_by_block(ty: GgmlType) -> bool {
    matches!(ty, GgmlType::F32)
}

/// Shared memory of the matvec kernels that take such a type: a word a warp and token.
pub const MATVEC_SHARED_BYTES: u32 = MATVEC_BLOCK / WARP * 4 * 4;

/// `y += w·x` instead of `y = w·x`.
pub const MATVEC_ACCUMULATE: u32 = 1;
/// The routes of one token share its activation row (expert gate and up); otherwise each route has its
/// own (expert down).
pub const MATVEC_SHARED_X: u32 = 2;

/// Parameters of `matvec_*`. A dense product is one route a token.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct MatvecParams {
    /// Byte offsets of the weight's planes ([`crate::layout::plane_offsets`] of the whole tensor).
    pub planes: [u64; MAX_PLANES],
    /// Rows of one expert's matrix, or of the matrix.
    pub rows: u32,
    /// 16-byte chunks in a row.
    pub chunks: u32,
    /// [`MatvecShape::lanes_log2`] of the type and `chunks`.
    pub lanes_log2: u32,
    /// Experts in the tensor; larger ids are read as the last.
    pub n_expert: u32,
    /// Elements from one row of `x` to the next.
    pub x_stride: u32,
    /// Elements from one row of `y` to the next.
    pub y_stride: u32,
    /// Elements from one token's expert ids to the next token's.
    pub ids_stride: u32,
    /// Routes of a token; 1 for a dense product.
    pub n_used: u32,
    /// Routes of all tokens.
    pub routes: u32,
    /// `MATVEC_*` bits.
    pub flags: u32,
}

/// The most products of the same activations in one launch of `matvecs_*`.
pub const MATVECS_MAX: usize = 4;

/// One of the products of `matvecs_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct MatvecsPart {
    /// Byte offsets of the weight's planes.
    pub planes: [u64; MAX_PLANES],
    /// Rows of the matrix.
    pub rows: u32,
    /// 16-byte chunks in a row.
    pub chunks: u32,
    /// [`MatvecShape::lanes_log2`] of the type and `chunks`.
    pub lanes_log2: u32,
    /// Elements from one row of `y` to the next.
    pub y_stride: u32,
    /// The first block of this product; `u32::MAX` for one that is not there.
    pub first_block: u32,
    /// 1 where the weights are F32 and take f32 activations.
    pub plain: u32,
}

/// Parameters of `matvecs_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct MatvecsParams {
    /// The products, in the order of their first blocks; the first block of the first is 0.
    pub parts: [MatvecsPart; MATVECS_MAX],
    /// Elements of a row of activations, in both forms.
    pub cols: u32,
    /// Rows of activations.
    pub tokens: u32,
}

/// Parameters of `repack_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct RepackParams {
    /// Byte offsets of the tensor's planes.
    pub planes: [u64; MAX_PLANES],
    /// The tensor's block that the first source block is.
    pub first_block: u64,
    /// Source blocks.
    pub n_blocks: u64,
}

/// Parameters of `embedding_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct EmbeddingParams {
    /// Byte offsets of the table's planes.
    pub planes: [u64; MAX_PLANES],
    /// Rows of the table; larger token ids are read as the last.
    pub rows: u32,
    /// 16-byte chunks in a row.
    pub chunks: u32,
    /// Elements from one row of `y` to the next.
    pub y_stride: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of `quantize_q8`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct QuantizeQ8Params {
    /// Elements of a row, a multiple of 32.
    pub cols: u32,
    /// Elements from one row of `x` to the next, a multiple of 4.
    pub x_stride: u32,
}
