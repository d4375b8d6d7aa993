//! Conversions between f32 and the 16-bit floats, in one instruction each.
//!
//! `half`'s own conversions are long and branchy where the target has no intrinsic that it knows.
//!
//! PTX ISA: "cvt".

use half::{bf16, f16};

#[cfg(target_arch = "nvptx64")]
mod imp {
    use core::arch::asm;

    #[inline(always)]
    pub(super) fn f16_to_f32(bits: u16) -> f32 {
        let value;
        // SAFETY: arithmetic on registers.
        unsafe { asm!("cvt.f32.f16 {}, {};", out(reg32) value, in(reg16) bits, options(pure, nomem, nostack)) }
        value
    }
    #[inline(always)]
    pub(super) fn f32_to_f16(value: f32) -> u16 {
        let bits;
        // SAFETY: arithmetic on registers.
        unsafe { asm!("cvt.rn.f16.f32 {}, {};", out(reg16) bits, in(reg32) value, options(pure, nomem, nostack)) }
        bits
    }
    #[inline(always)]
    pub(super) fn f32_to_bf16(value: f32) -> u16 {
        let bits;
        // SAFETY: arithmetic on registers.
        unsafe { asm!("cvt.rn.bf16.f32 {}, {};", out(reg16) bits, in(reg32) value, options(pure, nomem, nostack)) }
        bits
    }
    #[inline(always)]
    pub(super) fn pack_f16x2(low: f32, high: f32) -> u32 {
        let bits;
        // SAFETY: arithmetic on registers. The instruction's first source is the upper half.
        unsafe {
            asm!("cvt.rn.f16x2.f32 {}, {}, {};", out(reg32) bits, in(reg32) high, in(reg32) low,
                options(pure, nomem, nostack));
        }
        bits
    }
    #[inline(always)]
    pub(super) fn pack_bf16x2(low: f32, high: f32) -> u32 {
        let bits;
        // SAFETY: as above.
        unsafe {
            asm!("cvt.rn.bf16x2.f32 {}, {}, {};", out(reg32) bits, in(reg32) high, in(reg32) low,
                options(pure, nomem, nostack));
        }
        bits
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    use half::{bf16, f16};

    pub(super) fn f16_to_f32(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }
    pub(super) fn f32_to_f16(value: f32) -> u16 {
        f16::from_f32(value).to_bits()
    }
    pub(super) fn f32_to_bf16(value: f32) -> u16 {
        bf16::from_f32(value).to_bits()
    }
    pub(super) fn pack_f16x2(low: f32, high: f32) -> u32 {
        u32::from(f32_to_f16(low)) | u32::from(f32_to_f16(high)) << 16
    }
    pub(super) fn pack_bf16x2(low: f32, high: f32) -> u32 {
        u32::from(f32_to_bf16(low)) | u32::from(f32_to_bf16(high)) << 16
    }
}

/// The value of an f16's bits, exactly.
#[inline(always)]
#[must_use]
pub fn f16_to_f32(bits: u16) -> f32 {
    imp::f16_to_f32(bits)
}

/// The nearest f16's bits, ties to even.
#[inline(always)]
#[must_use]
pub fn f32_to_f16(value: f32) -> u16 {
    imp::f32_to_f16(value)
}

/// The value of a bf16's bits, exactly.
#[inline(always)]
#[must_use]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bf16's bits, ties to even.
#[inline(always)]
#[must_use]
pub fn f32_to_bf16(value: f32) -> u16 {
    imp::f32_to_bf16(value)
}

/// Two f16 in a register, `low` in the lower half.
#[inline(always)]
#[must_use]
pub fn pack_f16x2(low: f32, high: f32) -> u32 {
    imp::pack_f16x2(low, high)
}

/// Two bf16 in a register, `low` in the lower half.
#[inline(always)]
#[must_use]
pub fn pack_bf16x2(low: f32, high: f32) -> u32 {
    imp::pack_bf16x2(low, high)
}

/// The two f16 of a register as f32, lower half first.
#[inline(always)]
#[must_use]
pub fn unpack_f16x2(bits: u32) -> [f32; 2] {
    [f16_to_f32(bits as u16), f16_to_f32((bits >> 16) as u16)]
}

/// The two bf16 of a register as f32, lower half first.
#[inline(always)]
#[must_use]
pub fn unpack_bf16x2(bits: u32) -> [f32; 2] {
    [f32::from_bits(bits << 16), f32::from_bits(bits & 0xffff_0000)]
}

/// [`f16_to_f32`] of `half`'s type, as block structs hold it.
#[inline(always)]
#[must_use]
pub fn f16_value(h: f16) -> f32 {
    f16_to_f32(h.to_bits())
}

/// [`bf16_to_f32`] of `half`'s type.
#[inline(always)]
#[must_use]
pub fn bf16_value(h: bf16) -> f32 {
    bf16_to_f32(h.to_bits())
}
