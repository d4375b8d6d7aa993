//! F32, F16, BF16: a chunk is 16 bytes of plain numbers.
//!
//! Stored as in the file. They have no product with 8-bit activations: such weights are few and
//! sensitive (routers, norms), so they take f32 ones.

use cuda_std::prelude::*;

use super::{Format, Row};
use crate::blocks::GgmlType;

/// IEEE single precision.
pub struct F32;
/// IEEE half precision.
pub struct F16;
/// bfloat16: the upper half of an IEEE single.
pub struct Bf16;

/// The two 16-bit numbers of quad `I` in each of two words.
#[inline(always)]
fn halves<const I: u32>(raw: &U32x4) -> [u16; 4] {
    let words = raw.to_array();
    let (a, b) = (words[2 * I as usize], words[2 * I as usize + 1]);
    [a as u16, (a >> 16) as u16, b as u16, (b >> 16) as u16]
}

macro_rules! float {
    ($name:ident, $elems:literal, |$raw:ident, $i:ident| $quad:expr) => {
        impl Format for $name {
            const TYPE: GgmlType = GgmlType::$name;
            const RUNS: u32 = 1;
            const RUN_DISTANCE: u32 = 0;
            type Raw = U32x4;

            #[inline(always)]
            unsafe fn load(row: &Row, chunk: u32) -> U32x4 {
                // SAFETY: the caller's promise.
                unsafe { row.stream::<_, 0>(chunk) }
            }

            #[inline(always)]
            fn start(chunk: u32) -> u32 {
                chunk * $elems
            }

            #[inline(always)]
            fn quad<const $i: u32>($raw: &U32x4, _phase: u32) -> [f32; 4] {
                $quad
            }
        }
    };
}

float!(F32, 4, |raw, I| raw.to_array().map(f32::from_bits));
float!(F16, 8, |raw, I| halves::<I>(raw).map(convert::f16_to_f32));
float!(Bf16, 8, |raw, I| halves::<I>(raw).map(|bits| f32::from_bits(u32::from(bits) << 16)));
