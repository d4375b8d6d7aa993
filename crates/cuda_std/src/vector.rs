//! Vectors that move in one instruction, as CUDA's `float4` and `float2`.
//!
//! The alignment is the point: `[u32; 4]` is loaded as four words, a 16-byte aligned struct as one
//! `ld.global.v4.b32`.

use bytemuck::{Pod, Zeroable};

macro_rules! vector {
    ($name:ident, $elem:ty, $bytes:literal, $n:literal, $($field:ident),+) => {
        #[doc = concat!("`", stringify!($n), "` × `", stringify!($elem), "`, aligned to ", stringify!($bytes), " bytes.")]
        #[repr(C, align($bytes))]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
        #[allow(missing_docs, reason = "the fields are the elements in memory order")]
        pub struct $name { $(pub $field: $elem),+ }

        impl $name {
            /// All elements alike.
            #[inline(always)]
            pub fn splat(value: $elem) -> Self {
                Self { $($field: value),+ }
            }
            /// The elements in memory order.
            #[inline(always)]
            pub fn to_array(self) -> [$elem; $n] {
                [$(self.$field),+]
            }
            /// The elements in memory order.
            #[inline(always)]
            pub fn from_array([$($field),+]: [$elem; $n]) -> Self {
                Self { $($field),+ }
            }
        }
    };
}

vector!(F32x2, f32, 8, 2, x, y);
vector!(I32x2, i32, 8, 2, x, y);
vector!(U32x2, u32, 8, 2, x, y);
vector!(F32x4, f32, 16, 4, x, y, z, w);
vector!(I32x4, i32, 16, 4, x, y, z, w);
vector!(U32x4, u32, 16, 4, x, y, z, w);
