//! GGML tensor types and their quantisation blocks, byte for byte as GGUF files hold them.
//!
//! These types are layout only: no arithmetic lives here, so that the CPU reference and the GPU
//! kernels can each be written from the format's definition and checked against each other.
//!
//! Source: the GGUF specification and `ggml-common.h` (field names are ggml's).

use bytemuck::{Pod, Zeroable};
use half::f16;

/// Elements in a "K" super-block.
pub const QK_K: usize = 256;
/// Elements in a block of every other quantised type.
pub const QK: usize = 32;

macro_rules! block {
    ($(#[$doc:meta])* $name:ident, $elems:expr, $bytes:expr, { $($(#[$fdoc:meta])* $field:ident: $ty:ty),+ $(,)? }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
        #[allow(missing_docs, reason = "the fields are ggml's; the type's equation says what they are")]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty),+ }
        impl Block for $name { const ELEMS: usize = $elems; }
        const _: () = assert!(size_of::<$name>() == $bytes && align_of::<$name>() <= 4);
    };
}

/// A quantisation block: `ELEMS` consecutive elements of a row.
pub trait Block: Pod {
    /// Elements in one block; a row's length is a multiple of it.
    const ELEMS: usize;
}

block!(
    /// `v = d·(q − 8)`; element `j` is the low nibble of `qs[j]`, element `j + 16` the high one.
    BlockQ4_0, QK, 18, { d: f16, qs: [u8; 16] }
);
block!(
    /// `v = d·q + m`; nibbles as in [`BlockQ4_0`].
    BlockQ4_1, QK, 20, { d: f16, m: f16, qs: [u8; 16] }
);
block!(
    /// `v = d·(q − 16)`; nibbles as in [`BlockQ4_0`], the fifth bit of element `j` is bit `j` of `qh`
    /// (a little-endian 32-bit word kept as bytes: the block is only 2-byte aligned).
    BlockQ5_0, QK, 22, { d: f16, qh: [u8; 4], qs: [u8; 16] }
);
block!(
    /// `v = d·q + m`; bits as in [`BlockQ5_0`].
    BlockQ5_1, QK, 24, { d: f16, m: f16, qh: [u8; 4], qs: [u8; 16] }
);
block!(
    /// `v = d·q`.
    BlockQ8_0, QK, 34, { d: f16, qs: [i8; 32] }
);
block!(
    /// `v = 2^(e − 127)·E2M1(q)`; nibbles as in [`BlockQ4_0`], E2M1 = ±{0, ½, 1, 1½, 2, 3, 4, 6}.
    /// Source: OCP Microscaling Formats (MX) v1.0.
    BlockMxfp4, QK, 17, { e: u8, qs: [u8; 16] }
);
block!(
    /// `v = d·sc·q − dmin·mn` over eight sub-blocks of 32 with 6-bit `sc` and `mn` packed in `scales`.
    /// Sub-block `s` takes bytes `(s/2)·32 ..+32` of `qs`: even `s` the low nibbles, odd `s` the high.
    BlockQ4K, QK_K, 144, { d: f16, dmin: f16, scales: [u8; 12], qs: [u8; 128] }
);
block!(
    /// As [`BlockQ4K`] with a fifth bit: bit `s` of `qh[p]` for position `p` of sub-block `s`.
    BlockQ5K, QK_K, 176, { d: f16, dmin: f16, scales: [u8; 12], qh: [u8; 32], qs: [u8; 128] }
);
block!(
    /// `v = d·scales[e/16]·(q − 32)`. Each half of 128 holds four groups of 32, which are the low
    /// nibbles of `ql[0..32]` and `ql[32..64]`, then their high nibbles, with two more bits from `qh`.
    BlockQ6K, QK_K, 210, { ql: [u8; 128], qh: [u8; 64], scales: [i8; 16], d: f16 }
);

macro_rules! ggml_types {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $elems:expr, $bytes:expr, $text:literal;)+) => {
        /// The tensor types zinc reads, with ggml's numbers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum GgmlType { $($(#[$doc])* $name = $id),+ }

        impl GgmlType {
            /// Every supported type.
            pub const ALL: &[GgmlType] = &[$(GgmlType::$name),+];

            /// The type with ggml's number `id`, if zinc supports it.
            pub const fn from_id(id: u32) -> Option<GgmlType> {
                match id { $($id => Some(GgmlType::$name),)+ _ => None }
            }

            /// ggml's name, as tools print it.
            pub const fn name(self) -> &'static str {
                match self { $(GgmlType::$name => $text),+ }
            }

            /// Elements in a block; 1 for the plain float types.
            pub const fn block_elems(self) -> usize {
                match self { $(GgmlType::$name => $elems),+ }
            }

            /// Bytes in a block.
            pub const fn block_bytes(self) -> usize {
                match self { $(GgmlType::$name => $bytes),+ }
            }
        }
    };
}

ggml_types! {
    /// IEEE single precision.
    F32 = 0, 1, 4, "F32";
    /// IEEE half precision.
    F16 = 1, 1, 2, "F16";
    /// See [`BlockQ4_0`].
    Q4_0 = 2, QK, size_of::<BlockQ4_0>(), "Q4_0";
    /// See [`BlockQ4_1`].
    Q4_1 = 3, QK, size_of::<BlockQ4_1>(), "Q4_1";
    /// See [`BlockQ5_0`].
    Q5_0 = 6, QK, size_of::<BlockQ5_0>(), "Q5_0";
    /// See [`BlockQ5_1`].
    Q5_1 = 7, QK, size_of::<BlockQ5_1>(), "Q5_1";
    /// See [`BlockQ8_0`].
    Q8_0 = 8, QK, size_of::<BlockQ8_0>(), "Q8_0";
    /// See [`BlockQ4K`].
    Q4K = 12, QK_K, size_of::<BlockQ4K>(), "Q4_K";
    /// See [`BlockQ5K`].
    Q5K = 13, QK_K, size_of::<BlockQ5K>(), "Q5_K";
    /// See [`BlockQ6K`].
    Q6K = 14, QK_K, size_of::<BlockQ6K>(), "Q6_K";
    /// bfloat16: the upper half of an IEEE single.
    Bf16 = 30, 1, 2, "BF16";
    /// See [`BlockMxfp4`].
    Mxfp4 = 39, QK, size_of::<BlockMxfp4>(), "MXFP4";
}

impl core::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}
