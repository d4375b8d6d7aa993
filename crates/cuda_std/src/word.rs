//! The 32-bit register word, which shuffles, ordered loads and atomics move.

use bytemuck::Pod;

/// A type that fills one 32-bit register: `u32`, `i32`, `f32`.
pub trait Word: Pod + sealed::Sealed {
    /// The register's bits.
    fn to_bits(self) -> u32;
    /// The value of a register's bits.
    fn from_bits(bits: u32) -> Self;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for i32 {}
    impl Sealed for f32 {}
}

impl Word for u32 {
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits
    }
}

impl Word for i32 {
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self.cast_unsigned()
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits.cast_signed()
    }
}

impl Word for f32 {
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self.to_bits()
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        Self::from_bits(bits)
    }
}

/// `x`, of which the compiler knows nothing more. What is computed from it is computed where that is written: not ahead
/// of a loop, in registers that are wanted for other things. It costs no instruction.
#[inline(always)]
#[must_use]
pub fn opaque(x: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    let x = {
        let mut x = x;
        // SAFETY: does nothing. Not `pure`, so each call has a result of its own.
        unsafe { core::arch::asm!("/* {0} */", inout(reg32) x, options(nomem, nostack)) };
        x
    };
    x
}

/// As [`opaque`], for an address: what it is computed from is not needed where it is used.
#[inline(always)]
#[must_use]
pub fn opaque_ptr<T>(p: *const T) -> *const T {
    #[cfg(target_arch = "nvptx64")]
    let p = {
        let mut p = p;
        // SAFETY: does nothing. Not `pure`, so it stays where it is written.
        unsafe { core::arch::asm!("/* {0} */", inout(reg64) p, options(nomem, nostack)) };
        p
    };
    p
}
