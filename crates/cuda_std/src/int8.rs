//! Four 8-bit integers in a register: dot products and byte shuffles.
//!
//! PTX ISA: "dp4a", "prmt".

#[cfg(target_arch = "nvptx64")]
mod imp {
    unsafe extern "C" {
        #[link_name = "llvm.nvvm.idp4a.s.s"]
        pub(super) safe fn dp4a(a: i32, b: i32, c: i32) -> i32;
        #[link_name = "llvm.nvvm.idp4a.u.s"]
        pub(super) safe fn dp4a_us(a: i32, b: i32, c: i32) -> i32;
        #[link_name = "llvm.nvvm.prmt"]
        safe fn llvm_prmt(a: i32, b: i32, selector: i32) -> i32;
    }

    #[inline(always)]
    pub(super) fn prmt(a: u32, b: u32, selector: u32) -> u32 {
        llvm_prmt(a.cast_signed(), b.cast_signed(), selector.cast_signed()).cast_unsigned()
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    pub(super) fn dp4a(a: i32, b: i32, c: i32) -> i32 {
        let products = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
        products.fold(c, |sum, (a, b)| sum.wrapping_add(i32::from(a.cast_signed()) * i32::from(b.cast_signed())))
    }
    pub(super) fn dp4a_us(a: i32, b: i32, c: i32) -> i32 {
        let products = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
        products.fold(c, |sum, (a, b)| sum.wrapping_add(i32::from(a) * i32::from(b.cast_signed())))
    }
    pub(super) fn prmt(a: u32, b: u32, selector: u32) -> u32 {
        let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
        u32::from_le_bytes([0, 1, 2, 3].map(|i| {
            let nibble = selector >> (4 * i) & 0xf;
            let byte = bytes[(nibble & 7) as usize];
            if nibble & 8 == 0 { byte } else { (byte.cast_signed() >> 7).cast_unsigned() }
        }))
    }
}

/// `c + Σ_j a_j·b_j` over the four signed bytes of each.
#[inline(always)]
#[must_use]
pub fn dp4a(a: i32, b: i32, c: i32) -> i32 {
    imp::dp4a(a, b, c)
}

/// `c + Σ_j a_j·b_j` with unsigned bytes in `a` and signed ones in `b`.
#[inline(always)]
#[must_use]
pub fn dp4a_us(a: u32, b: i32, c: i32) -> i32 {
    imp::dp4a_us(a.cast_signed(), b, c)
}

/// Byte permute: byte `i` of the result is byte `selector[4i..4i+3]` of the eight bytes of `a` (0–3) and
/// `b` (4–7); with bit 3 of the nibble set, that byte's sign eight times.
#[inline(always)]
#[must_use]
pub fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    imp::prmt(a, b, selector)
}

/// Four integers in −128..=127 as the bytes of a register, the first lowest.
#[inline(always)]
#[must_use]
pub fn pack_i8x4(x: [i32; 4]) -> u32 {
    let low = prmt(x[0].cast_unsigned(), x[1].cast_unsigned(), 0x0040);
    let high = prmt(x[2].cast_unsigned(), x[3].cast_unsigned(), 0x0040);
    prmt(low, high, 0x5410)
}

/// The four signed bytes of a register, lowest first.
#[inline(always)]
#[must_use]
pub fn unpack_i8x4(bits: u32) -> [i32; 4] {
    let byte = |i: u32| (bits << (24 - 8 * i)).cast_signed() >> 24;
    [byte(0), byte(1), byte(2), byte(3)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_products_take_signs_as_named() {
        assert_eq!(
            dp4a(pack_i8x4([-128, 127, -1, 3]).cast_signed(), pack_i8x4([-128, 127, 5, -7]).cast_signed(), 10),
            16384 + 16129 - 5 - 21 + 10
        );
        assert_eq!(dp4a_us(0xff01_0203, pack_i8x4([1, -1, 1, -1]).cast_signed(), 0), 3 - 2 + 1 - 255);
    }

    #[test]
    fn bytes_are_little_endian() {
        assert_eq!(pack_i8x4([1, -2, 3, -4]), 0xfc03_fe01);
        assert_eq!(unpack_i8x4(0xfc03_fe01), [1, -2, 3, -4]);
    }

    /// The PTX ISA's default mode: bit 3 of a selector replicates the sign.
    #[test]
    fn permute_replicates_signs() {
        assert_eq!(prmt(0x8044_3322, 0x1188_7766, 0x7540), 0x1177_6622);
        assert_eq!(prmt(0x8044_3322, 0x1188_7766, 0xfeb8), 0x00ff_ff00);
    }
}
