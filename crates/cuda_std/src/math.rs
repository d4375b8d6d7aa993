//! f32 arithmetic that `core` lacks, from what the GPU has: relative errors of a few 1e-7.
//!
//! The device's approximations come first; the functions below them are the same code on both sides, so the
//! emulator's results differ from the GPU's by the approximations alone.
//!
//! PTX ISA: "Floating Point Instructions" (for the errors of the `.approx` forms).

#[cfg(target_arch = "nvptx64")]
mod imp {
    use core::arch::asm;

    unsafe extern "C" {
        #[link_name = "llvm.fma.f32"]
        pub(super) safe fn fma(a: f32, b: f32, c: f32) -> f32;
        #[link_name = "llvm.fma.f64"]
        pub(super) safe fn fma_f64(a: f64, b: f64, c: f64) -> f64;
        #[link_name = "llvm.sqrt.f32"]
        pub(super) safe fn sqrt(x: f32) -> f32;
        #[link_name = "llvm.rint.f32"]
        pub(super) safe fn rint(x: f32) -> f32;
        #[link_name = "llvm.rint.f64"]
        pub(super) safe fn rint_f64(x: f64) -> f64;
    }

    macro_rules! approx {
        ($name:ident, $op:literal) => {
            #[inline(always)]
            pub(super) fn $name(x: f32) -> f32 {
                let y;
                // SAFETY: arithmetic on registers.
                unsafe { asm!(concat!($op, " {}, {};"), out(reg32) y, in(reg32) x, options(pure, nomem, nostack)) }
                y
            }
        };
    }
    approx!(exp2, "ex2.approx.f32");
    approx!(log2, "lg2.approx.f32");
    approx!(rsqrt, "rsqrt.approx.f32");
    approx!(rcp, "rcp.approx.f32");
    approx!(rcp_ftz, "rcp.approx.ftz.f32");
    approx!(tanh, "tanh.approx.f32");

    #[inline(always)]
    pub(super) fn mul_rn(a: f32, b: f32) -> f32 {
        let y;
        // SAFETY: arithmetic on registers.
        unsafe {
            asm!("mul.rn.f32 {}, {}, {};", out(reg32) y, in(reg32) a, in(reg32) b, options(pure, nomem, nostack));
        }
        y
    }

    #[inline(always)]
    pub(super) fn fma_bf16x2(a: u32, b: u32, c: u32) -> u32 {
        let d;
        // SAFETY: arithmetic on registers.
        unsafe {
            asm!("fma.rn.bf16x2 {}, {}, {}, {};", out(reg32) d, in(reg32) a, in(reg32) b, in(reg32) c,
                options(pure, nomem, nostack));
        }
        d
    }

    #[inline(always)]
    pub(super) fn round_to_i32(x: f32) -> i32 {
        let y;
        // SAFETY: arithmetic on registers.
        unsafe { asm!("cvt.rni.s32.f32 {}, {};", out(reg32) y, in(reg32) x, options(pure, nomem, nostack)) }
        y
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    /// Rounded once: what an f64 cannot hold of the sum is left in its last bit ("rounding to odd").
    fn fma_bf16(a: u16, b: u16, c: u16) -> u16 {
        let value = |bits: u16| f64::from(crate::convert::bf16_to_f32(bits));
        let (product, c) = (value(a) * value(b), value(c));
        let sum = product + c;
        let shifted = sum - product;
        let rest = (product - (sum - shifted)) + (c - shifted);
        let odd = if rest == 0.0 || rest.is_nan() || sum.to_bits() & 1 == 1 {
            sum
        } else if (rest > 0.0) == (sum > 0.0) {
            f64::from_bits(sum.to_bits() + 1)
        } else {
            f64::from_bits(sum.to_bits() - 1)
        };
        // `from_f64` ignores the lower half of an f64, and with it what decides between two neighbours. That half only has
        // to be seen: it goes where the upper one has its last bit.
        let bits = odd.to_bits();
        let seen = bits & !0xffff_ffff | u64::from(bits & 0xffff_ffff != 0) << 32;
        half::bf16::from_f64(f64::from_bits(seen)).to_bits()
    }
    pub(super) fn fma_bf16x2(a: u32, b: u32, c: u32) -> u32 {
        let half = |shift: u32| u32::from(fma_bf16((a >> shift) as u16, (b >> shift) as u16, (c >> shift) as u16));
        half(0) | half(16) << 16
    }
    pub(super) fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    pub(super) fn fma_f64(a: f64, b: f64, c: f64) -> f64 {
        a.mul_add(b, c)
    }
    pub(super) fn sqrt(x: f32) -> f32 {
        x.sqrt()
    }
    pub(super) fn rint(x: f32) -> f32 {
        x.round_ties_even()
    }
    pub(super) fn rint_f64(x: f64) -> f64 {
        x.round_ties_even()
    }
    pub(super) fn exp2(x: f32) -> f32 {
        x.exp2()
    }
    pub(super) fn log2(x: f32) -> f32 {
        x.log2()
    }
    pub(super) fn rsqrt(x: f32) -> f32 {
        (1.0 / f64::from(x).sqrt()) as f32
    }
    pub(super) fn mul_rn(a: f32, b: f32) -> f32 {
        a * b
    }
    pub(super) fn rcp(x: f32) -> f32 {
        1.0 / x
    }
    pub(super) fn rcp_ftz(x: f32) -> f32 {
        let flush = |x: f32| if x.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(x) } else { x };
        flush(1.0 / flush(x))
    }
    pub(super) fn tanh(x: f32) -> f32 {
        x.tanh()
    }
    /// `cvt` saturates and makes NaN 0; so does `as`.
    pub(super) fn round_to_i32(x: f32) -> i32 {
        x.round_ties_even() as i32
    }
}

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident($($arg:ident),+) = $imp:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        #[must_use]
        pub fn $name($($arg: f32),+) -> f32 {
            imp::$imp($($arg),+)
        }
    )*};
}

functions! {
    /// `a·b + c`, rounded once.
    fma(a, b, c) = fma;
    /// `a·b`, rounded, whatever follows: the device's compiler makes a plain product and the sum it goes into one `fma`.
    mul_rn(a, b) = mul_rn;
    /// `√x`, correctly rounded.
    sqrt(x) = sqrt;
    /// The nearest integer, ties to even.
    rint(x) = rint;
    /// `2^x`, relative error 2^-22.
    exp2_approx(x) = exp2;
    /// `log2 x`: absolute error 2^-22 for x in [½, 2], relative error 2^-22 elsewhere.
    log2_approx(x) = log2;
    /// `1/√x`, relative error 2^-22.9.
    rsqrt(x) = rsqrt;
    /// `1/x`, error 1 ulp.
    rcp(x) = rcp;
    /// `1 / x` to about an ulp, where numbers too small to be normal count as 0: of an argument it is then infinite.
    rcp_ftz(x) = rcp_ftz;
    /// `tanh x`, relative error 2^-11: for gates that are quantised anyway.
    tanh_approx(x) = tanh;
}

/// `(a / b, a % b)`. Rust's own operators keep a branch to the code that reports a division by zero; kernels are to be
/// without, and their launchers check divisors.
///
/// # Safety
/// `b` is not zero. A debug build for the host checks it.
#[inline(always)]
pub unsafe fn div_rem(a: u32, b: u32) -> (u32, u32) {
    // SAFETY: the caller's.
    unsafe { core::hint::assert_unchecked(b != 0) };
    (a / b, a % b)
}

/// The nearest integer as `i32`, ties to even; saturates, and NaN is 0.
#[inline(always)]
#[must_use]
pub fn round_to_i32(x: f32) -> i32 {
    imp::round_to_i32(x)
}

/// `a·b + c` on two bf16 in a register, each rounded once.
#[inline(always)]
#[must_use]
pub fn fma_bf16x2(a: u32, b: u32, c: u32) -> u32 {
    imp::fma_bf16x2(a, b, c)
}

/// The larger; a NaN loses.
#[inline(always)]
#[must_use]
pub fn max(a: f32, b: f32) -> f32 {
    a.max(b)
}

/// The smaller; a NaN loses.
#[inline(always)]
#[must_use]
pub fn min(a: f32, b: f32) -> f32 {
    a.min(b)
}

/// log2 e, and what its f32 lacks.
const LOG2_E: f32 = core::f32::consts::LOG2_E;
const LOG2_E_TAIL: f32 = 1.925_963e-8;

/// `e^x`, relative error about 3e-7 where the result is a normal number; below that it goes to 0.
///
/// `x·log2 e` is split into an integer, whose power is exact, and a rest in [−½, ½]. Without the split the
/// product's rounding error would grow with x: 5e-6 at x = 80.
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    // Past these the result is ∞ and 0; the bounds keep ∞ − ∞ out. Comparisons, so that NaN passes.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let n = rint(x * LOG2_E);
    let n = if n > 127.0 { 127.0 } else { n }; // 2^128 is ∞ though e^x may not be
    let rest = fma(x, LOG2_E_TAIL, fma(x, LOG2_E, -n));
    exp2_approx(rest) * exp2_approx(n)
}

/// `ln x`, relative error about 1e-7. About 20 instructions; [`log2_approx`] is one.
///
/// `x = m·2^e` with m in [√½, √2); the polynomial in m − 1 is that of Cephes' `logf`. The bits of the exponent
/// are taken off by integer arithmetic, without a table or a branch that would need local memory.
#[inline(always)]
#[must_use]
pub fn log(x: f32) -> f32 {
    const SQRT_HALF_BITS: i32 = 0x3f35_04f3;
    // A subnormal is scaled up first, by a power of two that the exponent gives back.
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = if tiny { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits().cast_signed();
    let e = bits.wrapping_sub(SQRT_HALF_BITS) >> 23; // of a negative x it is nonsense, which is replaced below
    let m = f32::from_bits(bits.wrapping_sub(e << 23).cast_unsigned()) - 1.0;
    let e = (if tiny { e - 23 } else { e }) as f32;
    let z = m * m;
    // Written out: a loop over an array keeps the array in local memory.
    let p = fma(fma(7.037_684e-2, m, -1.151_461e-1), m, 1.167_699_9e-1);
    let p = fma(fma(p, m, -1.242_014_1e-1), m, 1.424_932_3e-1);
    let p = fma(fma(p, m, -1.666_805_8e-1), m, 2.000_071_5e-1);
    let p = fma(fma(p, m, -2.499_999_4e-1), m, 3.333_333e-1);
    // ln 2 in two parts, the first exact in a product with e.
    let low = fma(e, -2.121_944_4e-4, fma(p * m, z, -0.5 * z));
    let value = fma(e, 0.693_359_4, m + low);
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    let value = if x < 0.0 { f32::NAN } else { value };
    if x < f32::INFINITY { value } else { x } // ∞ and NaN
}

/// `ln(1 + e^x)` without overflow, relative error about 5e-7.
#[inline(always)]
#[must_use]
pub fn softplus(x: f32) -> f32 {
    // ln(1 + e^x) = max(x, 0) + ln(1 + y) with y = e^−|x|. The sum u = 1 + y loses low bits of y, and
    // ln(1 + y) ≈ ln u + (y − (u − 1))/u gives them back (Kahan).
    let y = exp(-x.abs());
    let u = 1.0 + y;
    max(x, 0.0) + fma(y - (u - 1.0), rcp(u), log(u))
}

/// `1/(1 + e^−x)`, relative error about 5e-7.
#[inline(always)]
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    rcp(1.0 + exp(-x))
}

/// `x·σ(x)`.
#[inline(always)]
#[must_use]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `(sin x, cos x)`, absolute error 1.2e-7 for |x| up to 1e9: rope angles reach the context length.
///
/// The multiple of π/2 is taken off in f64, a handful of instructions, which is what keeps large angles
/// right; the polynomials on [−π/4, π/4] are Cephes' `sinf` and `cosf`.
#[inline(always)]
#[must_use]
pub fn sin_cos(x: f32) -> (f32, f32) {
    use core::f64::consts::{FRAC_2_PI, FRAC_PI_2};
    let wide = f64::from(x);
    let n = imp::rint_f64(wide * FRAC_2_PI);
    let r = imp::fma_f64(-n, FRAC_PI_2, wide) as f32;
    let z = r * r;
    let sin = fma(fma(fma(-1.951_529_6e-4, z, 8.332_161e-3), z, -1.666_665_5e-1), z * r, r);
    let cos = fma(fma(fma(2.443_315_7e-5, z, -1.388_731_6e-3), z, 4.166_664_6e-2), z * z, fma(-0.5, z, 1.0));
    // n mod 4 says in which quarter turn we are. |n| < 2^31 for the angles promised above.
    let quadrant = n as i32;
    let (sin, cos) = if quadrant & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let sin = if quadrant & 2 == 0 { sin } else { -sin };
    let cos = if quadrant.wrapping_add(1) & 2 == 0 { cos } else { -cos };
    (sin, cos)
}

/// `sin x`; see [`sin_cos`].
#[inline(always)]
#[must_use]
pub fn sin(x: f32) -> f32 {
    sin_cos(x).0
}

/// `cos x`; see [`sin_cos`].
#[inline(always)]
#[must_use]
pub fn cos(x: f32) -> f32 {
    sin_cos(x).1
}

/// `tanh x`, error about 1 ulp; [`tanh_approx`] is one instruction.
#[inline(always)]
#[must_use]
pub fn tanh(x: f32) -> f32 {
    // tanh = 1 − 2/(e^2|x| + 1) loses digits near 0, where the odd polynomial (Cephes `tanhf`) takes over.
    let a = x.abs();
    if a < 0.625 {
        let z = x * x;
        let p = fma(
            fma(fma(fma(-5.704_988_7e-3, z, 2.063_909e-2), z, -5.373_971_6e-2), z, 1.333_144_2e-1),
            z,
            -3.333_328e-1,
        );
        fma(p * z, x, x)
    } else {
        (1.0 - 2.0 * rcp(exp(2.0 * a) + 1.0)).copysign(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest error of `f` against the f64 function, relative to `scale` of the exact value.
    fn worst(f: fn(f32) -> f32, exact: fn(f64) -> f64, scale: fn(f64) -> f64, xs: impl Iterator<Item = f32>) -> f64 {
        let errors = xs.map(|x| {
            let want = exact(f64::from(x));
            (f64::from(f(x)) - want).abs() / scale(want)
        });
        errors.fold(0.0, f64::max)
    }

    /// `n` values from `low` to `high`.
    fn sweep(low: f32, high: f32, n: u32) -> impl Iterator<Item = f32> {
        (0..=n).map(move |i| low + (high - low) * (i as f32 / n as f32))
    }

    #[test]
    fn errors_are_as_documented() {
        let relative = f64::abs;
        assert!(worst(exp, f64::exp, relative, sweep(-87.0, 88.7, 100_001)) < 3e-7);
        assert!(worst(log, f64::ln, relative, sweep(1e-6, 100.0, 100_003)) < 1.5e-7);
        assert!(worst(log, f64::ln, relative, sweep(0.5, 2.0, 100_003)) < 1.5e-7);
        assert!(worst(softplus, |x| x.exp().ln_1p(), relative, sweep(-80.0, 80.0, 100_003)) < 5e-7);
        assert!(worst(sigmoid, |x| 1.0 / (1.0 + (-x).exp()), relative, sweep(-80.0, 80.0, 100_003)) < 5e-7);
        assert!(worst(tanh, f64::tanh, relative, sweep(-10.0, 10.0, 100_003)) < 3e-7);
        let absolute = |_| 1.0;
        for limit in [10.0, 1e4, 1e6, 1e9] {
            assert!(worst(sin, f64::sin, absolute, sweep(-limit, limit, 100_003)) < 1.2e-7, "sin to {limit}");
            assert!(worst(cos, f64::cos, absolute, sweep(-limit, limit, 100_003)) < 1.2e-7, "cos to {limit}");
        }
    }

    #[test]
    fn limits_are_right() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(log(0.0), f32::NEG_INFINITY);
        assert_eq!(log(1.0), 0.0);
        assert_eq!(log(f32::INFINITY), f32::INFINITY);
        assert!(log(-1.0).is_nan() && log(-1e30).is_nan() && log(f32::NAN).is_nan());
        let past_the_promise = std::panic::catch_unwind(|| sin_cos(-1e30));
        assert!(past_the_promise.is_ok(), "any value, but no overflow");
        let subnormal = 1e-42f32;
        assert!((f64::from(log(subnormal)) - f64::from(subnormal).ln()).abs() < 1e-5);
        assert_eq!(softplus(1e4), 1e4);
        assert_eq!(softplus(-1e4), 0.0);
        assert_eq!(sigmoid(-1e4), 0.0);
        assert_eq!(sigmoid(1e4), 1.0);
        assert_eq!(tanh(1e4), 1.0);
        assert_eq!(tanh(-1e4), -1.0);
        assert_eq!(round_to_i32(2.5), 2);
        assert_eq!(round_to_i32(-1e20), i32::MIN);
        assert_eq!(round_to_i32(f32::NAN), 0);
    }
}
