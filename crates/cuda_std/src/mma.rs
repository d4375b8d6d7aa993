//! Tensor cores: `mma.sync` on 16×8 tiles, and `ldmatrix`, which loads their fragments.
//!
//! `D[16,8] = A[16,k]·B[k,8] + C[16,8]`. The warp holds the matrices together; with `g = lane / 4` and
//! `t = lane % 4`, a lane's registers hold:
//!
//! | | register | rows | columns |
//! |---|---|---|---|
//! | A, s8, k = 32 | `a[j]`, byte `i` | `g + 8·(j % 2)` | `4t + i + 16·(j / 2)` |
//! | B, s8, k = 32 | `b[j]`, byte `i` | `4t + i + 16·j` | `g` |
//! | A, s8, k = 16 | `a[j]`, byte `i` | `g + 8·j` | `4t + i` |
//! | B, s8, k = 16 | `b`, byte `i` | `4t + i` | `g` |
//! | A, 16-bit, k = 16 | `a[j]`, half `i` | `g + 8·(j % 2)` | `2t + i + 8·(j / 2)` |
//! | B, 16-bit, k = 16 | `b[j]`, half `i` | `2t + i + 8·j` | `g` |
//! | C and D | `c[j]` | `g + 8·(j / 2)` | `2t + j % 2` |
//!
//! PTX ISA: "Matrix Fragments for mma.m16n8k16 with floating point type", "… for mma.m16n8k32",
//! "Warp-level matrix load instruction: ldmatrix". All are there from sm_80 on.

use crate::shared::Shared;
use bytemuck::Pod;

#[cfg(target_arch = "nvptx64")]
mod imp {
    use core::arch::asm;

    /// Not `pure`: like any collective it must not move into a branch. (LLVM's intrinsic would be allowed to,
    /// it is `memory(none)` and not convergent.) Copies for the two sides of a branch stay possible in
    /// principle, so the branches around it should be alike for the whole warp, as they are in a tile loop.
    macro_rules! mma {
        ($name:ident, $op:literal, $acc:ty) => {
            #[inline(always)]
            pub(super) unsafe fn $name(a: [u32; 4], b: [u32; 2], c: [$acc; 4]) -> [$acc; 4] {
                let [mut d0, mut d1, mut d2, mut d3] = c;
                // SAFETY: the caller's promise: the whole warp is here. Arithmetic on registers.
                unsafe {
                    asm!(
                        concat!($op, " {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};"),
                        inout(reg32) d0, inout(reg32) d1, inout(reg32) d2, inout(reg32) d3,
                        in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                        in(reg32) b[0], in(reg32) b[1],
                        options(nomem, nostack),
                    );
                }
                [d0, d1, d2, d3]
            }
        };
    }
    mma!(m16n8k32_s8, "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", i32);
    mma!(m16n8k16_f16, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", f32);
    mma!(m16n8k16_bf16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", f32);

    /// As the others, with half of the factors.
    #[inline(always)]
    pub(super) unsafe fn m16n8k16_s8(a: [u32; 2], b: u32, c: [i32; 4]) -> [i32; 4] {
        let [mut d0, mut d1, mut d2, mut d3] = c;
        // SAFETY: as above.
        unsafe {
            asm!(
                "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}}}, {{{6}}}, {{{0}, {1}, {2}, {3}}};",
                inout(reg32) d0, inout(reg32) d1, inout(reg32) d2, inout(reg32) d3,
                in(reg32) a[0], in(reg32) a[1], in(reg32) b,
                options(nomem, nostack),
            );
        }
        [d0, d1, d2, d3]
    }

    macro_rules! ldmatrix {
        ($name:ident, $op:literal) => {
            #[inline(always)]
            pub(super) unsafe fn $name(row: u32) -> [u32; 4] {
                let (x, y, z, w);
                // SAFETY: the caller's promise: the whole warp is here, with rows in shared memory.
                // `readonly`, so it stays between the stores and barriers around it.
                unsafe {
                    asm!(concat!($op, " {{{}, {}, {}, {}}}, [{}];"), out(reg32) x, out(reg32) y, out(reg32) z,
                        out(reg32) w, in(reg32) row, options(readonly, nostack));
                }
                [x, y, z, w]
            }
        };
    }
    ldmatrix!(ldmatrix_x4, "ldmatrix.sync.aligned.m8n8.x4.shared.b16");
    ldmatrix!(ldmatrix_x4_trans, "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16");
}

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    use crate::convert::{bf16_to_f32, f16_to_f32};
    use crate::emu::lane;
    use crate::emu::warp::{Collective, Given};
    use crate::warp::FULL_MASK;

    const B: usize = 4;
    const C: usize = 6;

    fn fragment(a: [u32; 4], b: [u32; 2], c: [u32; 4]) -> [u32; 10] {
        [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]]
    }

    /// `Σ_k A[row, k]·B[k, col]`, by the table at the top: the lanes of a group of four hold a row of A
    /// and a column of B, each `per_word` consecutive `k` of every word pair.
    fn dot<T: core::iter::Sum>(given: &Given<'_, 10>, row: u32, col: u32, product: impl Fn(u32, u32) -> T) -> T {
        let products = (0..4).flat_map(|t| (0..2).map(move |j| (t, j))).map(|(t, j)| {
            let a = given.of(row % 8 * 4 + t)[(row / 8) as usize + 2 * j];
            let b = given.of(col * 4 + t)[B + j];
            product(a, b)
        });
        products.sum()
    }

    fn s8_product(a: u32, b: u32) -> i64 {
        i64::from(crate::int8::dp4a(a.cast_signed(), b.cast_signed(), 0))
    }

    fn half_product(a: u32, b: u32, value: fn(u16) -> f32) -> f64 {
        let half = |word: u32, i: u32| f64::from(value((word >> (16 * i)) as u16));
        half(a, 0) * half(b, 0) + half(a, 1) * half(b, 1)
    }

    /// Row and column of `c[j]` in `lane`.
    fn place(lane: u32, j: usize) -> (u32, u32) {
        (lane / 4 + 8 * (j as u32 / 2), lane % 4 * 2 + j as u32 % 2)
    }

    #[track_caller]
    pub(super) unsafe fn m16n8k32_s8(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
        let given = fragment(a, b, c.map(i32::cast_unsigned));
        let bits = lane::current().exchange(Collective::MmaS8, FULL_MASK, given, |given, lane| {
            [0, 1, 2, 3].map(|j| {
                let (row, col) = place(lane, j);
                // Without saturation the sum wraps (PTX ISA, ".satfinite").
                (dot(given, row, col, s8_product) as i32)
                    .wrapping_add(given.of(lane)[C + j].cast_signed())
                    .cast_unsigned()
            })
        });
        bits.map(u32::cast_signed)
    }

    /// The upper half of the k = 32 form's factors is 0.
    #[track_caller]
    pub(super) unsafe fn m16n8k16_s8(a: [u32; 2], b: u32, c: [i32; 4]) -> [i32; 4] {
        // SAFETY: the caller's promise.
        unsafe { m16n8k32_s8([a[0], a[1], 0, 0], [b, 0], c) }
    }

    /// The order of the hardware's sum is not specified; here it is exact, then rounded once.
    #[track_caller]
    fn m16n8k16(kind: Collective, a: [u32; 4], b: [u32; 2], c: [f32; 4], value: fn(u16) -> f32) -> [f32; 4] {
        let given = fragment(a, b, c.map(f32::to_bits));
        let bits = lane::current().exchange(kind, FULL_MASK, given, |given, lane| {
            [0, 1, 2, 3].map(|j| {
                let (row, col) = place(lane, j);
                let c = f64::from(f32::from_bits(given.of(lane)[C + j]));
                ((dot(given, row, col, |a, b| half_product(a, b, value)) + c) as f32).to_bits()
            })
        });
        bits.map(f32::from_bits)
    }

    #[track_caller]
    pub(super) unsafe fn m16n8k16_f16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        m16n8k16(Collective::MmaF16, a, b, c, f16_to_f32)
    }
    #[track_caller]
    pub(super) unsafe fn m16n8k16_bf16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        m16n8k16(Collective::MmaBf16, a, b, c, bf16_to_f32)
    }

    /// Every lane's row address, to every lane.
    #[track_caller]
    fn rows(kind: Collective, row: u32) -> [u32; 32] {
        lane::current()
            .exchange(kind, FULL_MASK, [row], |given, _| core::array::from_fn(|lane| given.of(lane as u32)[0]))
    }

    #[track_caller]
    pub(super) unsafe fn ldmatrix_x4(row: u32) -> [u32; 4] {
        let lane = lane::current();
        let rows = rows(Collective::LdMatrix, row);
        let (g, t) = (lane.lane_id() / 4, lane.lane_id() % 4);
        lane.check_aligned_row(row);
        [0, 8, 16, 24].map(|matrix| lane.shared_load(rows[(matrix + g) as usize].wrapping_add(4 * t)))
    }
    #[track_caller]
    pub(super) unsafe fn ldmatrix_x4_trans(row: u32) -> [u32; 4] {
        let lane = lane::current();
        let rows = rows(Collective::LdMatrixTrans, row);
        let (g, t) = (lane.lane_id() / 4, lane.lane_id() % 4);
        lane.check_aligned_row(row);
        [0, 8, 16, 24].map(|matrix| {
            let half = |i: u32| -> u16 { lane.shared_load(rows[(matrix + 2 * t + i) as usize].wrapping_add(2 * g)) };
            u32::from(half(0)) | u32::from(half(1)) << 16
        })
    }
}

/// `D = A·B + C` with s8 factors, k = 32, and s32 sums, which wrap.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn m16n8k32_s8(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
    // SAFETY: the caller's promise.
    unsafe { imp::m16n8k32_s8(a, b, c) }
}

/// `D = A·B + C` with s8 factors, k = 16, and s32 sums, which wrap.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn m16n8k16_s8(a: [u32; 2], b: u32, c: [i32; 4]) -> [i32; 4] {
    // SAFETY: the caller's promise.
    unsafe { imp::m16n8k16_s8(a, b, c) }
}

/// `D = A·B + C` with f16 factors, k = 16, and f32 sums.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn m16n8k16_f16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    // SAFETY: the caller's promise.
    unsafe { imp::m16n8k16_f16(a, b, c) }
}

/// `D = A·B + C` with bf16 factors, k = 16, and f32 sums.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn m16n8k16_bf16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    // SAFETY: the caller's promise.
    unsafe { imp::m16n8k16_bf16(a, b, c) }
}

/// Loads four 8×8 matrices of 16-bit elements (or 8×16 of bytes). Lane `i` names row `i % 8` of matrix `i / 8`,
/// 16 bytes from element `i_elem` of `rows` on; word `m` of the result is this lane's part of matrix `m`:
/// row `lane / 4`, bytes `4·(lane % 4)` to `+3`. That is the layout of A's and B's registers.
///
/// # Safety
/// Every lane of the warp comes here; each row is 16-byte aligned, as [`Shared::get`] asks otherwise.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn ldmatrix_x4<T: Pod>(rows: Shared<T>, i_elem: u32) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe { imp::ldmatrix_x4(rows.address_of(i_elem)) }
}

/// As [`ldmatrix_x4`], each matrix of 16-bit elements transposed: a lane gets column `lane / 4`, rows
/// `2·(lane % 4)` and `+1`.
///
/// # Safety
/// As [`ldmatrix_x4`].
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn ldmatrix_x4_trans<T: Pod>(rows: Shared<T>, i_elem: u32) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe { imp::ldmatrix_x4_trans(rows.address_of(i_elem)) }
}
