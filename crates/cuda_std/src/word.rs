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
