//! Planar device layouts of quantised tensors.
//!
//! A GGUF block packs its fields back to back, so that most block sizes (34, 210, 17 bytes …) leave
//! nothing aligned. On the device a tensor's blocks are split into *planes*: plane `i` holds field `i`
//! of every block, in block order, from an offset that is a multiple of [`PLANE_ALIGN`]. The bytes are
//! the file's, none added between blocks and none changed; only their places differ, in Q5_K those of bits, too
//! ([`format`](crate::kernels::format::Q5K)). Plane 0 is the one whose bytes a warp streams, 16 to a lane.
//!
//! A tensor `[n_expert, rows, cols]` has `n_expert·rows·(cols / block_elems)` blocks, numbered
//! `(expert·rows + row)·blocks_per_row + b`. Float types have one plane: the file's bytes as they are.
//!
//! The repack kernels, the launchers and the host's memory plan all read this table.

use crate::blocks::GgmlType;

/// Every plane starts at a multiple of this, which is also the driver's alignment of allocations.
pub const PLANE_ALIGN: u64 = 256;
/// The most planes that a type has.
pub const MAX_PLANES: usize = 4;
/// Bytes that one lane takes from plane 0 at a time: the widest load.
pub const CHUNK_BYTES: u32 = 16;

/// One field, or a run of neighbouring fields, of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Where the field lies in the file's block, in bytes.
    pub field: usize,
    /// Its size in bytes.
    pub bytes: usize,
}

const fn plane(field: usize, bytes: usize) -> Plane {
    Plane { field, bytes }
}

/// The planes of a type, in device order.
pub const fn planes(ty: GgmlType) -> &'static [Plane] {
    match ty {
        GgmlType::F32 => const { &[plane(0, 4)] },
        GgmlType::F16 | GgmlType::Bf16 => const { &[plane(0, 2)] },
        // qs, d
        GgmlType::Q4_0 => const { &[plane(2, 16), plane(0, 2)] },
        GgmlType::Q8_0 => const { &[plane(2, 32), plane(0, 2)] },
        // qs, (d, m)
        GgmlType::Q4_1 => const { &[plane(4, 16), plane(0, 4)] },
        // qs, qh, d
        GgmlType::Q5_0 => const { &[plane(6, 16), plane(2, 4), plane(0, 2)] },
        // qs, qh, (d, m)
        GgmlType::Q5_1 => const { &[plane(8, 16), plane(4, 4), plane(0, 4)] },
        // qs, e
        GgmlType::Mxfp4 => const { &[plane(1, 16), plane(0, 1)] },
        // qs, (d, dmin, scales)
        GgmlType::Q4K => const { &[plane(16, 128), plane(0, 16)] },
        // qs and qh, whose bits are mixed, (d, dmin, scales)
        GgmlType::Q5K => const { &[plane(48, 128), plane(16, 32), plane(0, 16)] },
        // ql, qh, scales, d
        GgmlType::Q6K => const { &[plane(0, 128), plane(128, 64), plane(192, 16), plane(208, 2)] },
    }
}

/// Where each plane of a tensor of `n_blocks` blocks starts, in bytes from the tensor's start; planes
/// that the type lacks start at the end. `None` if a size leaves 64 bits.
pub const fn plane_offsets(ty: GgmlType, n_blocks: u64) -> Option<[u64; MAX_PLANES]> {
    match layout(ty, n_blocks) {
        Some((offsets, _)) => Some(offsets),
        None => None,
    }
}

/// Bytes that a tensor of `n_blocks` blocks takes on the device. `None` if they leave 64 bits.
pub const fn device_bytes(ty: GgmlType, n_blocks: u64) -> Option<u64> {
    match layout(ty, n_blocks) {
        Some((_, end)) => Some(end),
        None => None,
    }
}

const fn layout(ty: GgmlType, n_blocks: u64) -> Option<([u64; MAX_PLANES], u64)> {
    let table = planes(ty);
    let mut offsets = [0; MAX_PLANES];
    let mut end = 0u64;
    let mut i = 0;
    while i < MAX_PLANES {
        offsets[i] = end;
        if i < table.len() {
            let Some(bytes) = n_blocks.checked_mul(table[i].bytes as u64) else { return None };
            let Some(bytes) = bytes.checked_next_multiple_of(PLANE_ALIGN) else { return None };
            end = match end.checked_add(bytes) {
                Some(end) => end,
                None => return None,
            };
        }
        i += 1;
    }
    Some((offsets, end))
}

/// Elements in one chunk: [`CHUNK_BYTES`] bytes of plane 0 and what the other planes add to them.
pub const fn chunk_elems(ty: GgmlType) -> u32 {
    let plane = planes(ty)[0].bytes as u32;
    let elems = ty.block_elems() as u32;
    if plane >= CHUNK_BYTES { elems / (plane / CHUNK_BYTES) } else { elems * (CHUNK_BYTES / plane) }
}

/// Chunks in one block; 1 for the float types, whose "block" here is a chunk.
pub const fn block_chunks(ty: GgmlType) -> u32 {
    let plane = planes(ty)[0].bytes as u32;
    if plane >= CHUNK_BYTES { plane / CHUNK_BYTES } else { 1 }
}

/// Bytes of one block in each plane; for the float types, of one chunk.
pub const fn plane_bytes(ty: GgmlType) -> [u64; MAX_PLANES] {
    let table = planes(ty);
    let mut bytes = [0; MAX_PLANES];
    let mut i = 0;
    while i < table.len() {
        bytes[i] = table[i].bytes as u64;
        i += 1;
    }
    if ty.block_elems() == 1 {
        bytes[0] = CHUNK_BYTES as u64;
    }
    bytes
}

// Planes hold a block's bytes, all of them and each once: that is what makes repacking lossless.
const _: () = {
    let mut t = 0;
    while t < GgmlType::ALL.len() {
        // One bit a byte: no block is longer than 256.
        let (ty, mut low, mut high, mut i) = (GgmlType::ALL[t], 0u128, 0u128, 0);
        while i < planes(ty).len() {
            let Plane { field, bytes } = planes(ty)[i];
            let mut byte = field;
            while byte < field + bytes {
                let bit = 1u128 << (byte % 128);
                assert!((if byte < 128 { low } else { high }) & bit == 0, "two planes hold the same byte");
                if byte < 128 {
                    low |= bit
                } else {
                    high |= bit
                }
                byte += 1;
            }
            i += 1;
        }
        assert!(low.count_ones() + high.count_ones() == ty.block_bytes() as u32, "a byte is in no plane");
        t += 1;
    }
};
