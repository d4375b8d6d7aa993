//! Launcher of `repack_*`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::repack as kernels;
use gpu_kernels::params::{FLAT_BLOCK, RepackParams};

use super::{Check, Matrix, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Puts blocks as they are in the file, `raw`, at blocks `first_block..` of `w`. Float types are copied.
///
/// The kernels that read `w` may be launched behind it, but not as dependent launches
/// ([`Matvec::dependent`](super::Matvec::dependent)): those load weights before the launch ahead has ended.
///
/// # Errors
/// Where `raw` is no whole number of blocks, or more than `w` has from there on.
#[expect(unsafe_code, reason = "a launch")]
pub fn repack<D: Device>(device: &D, raw: Slice<'_, u8>, w: Matrix<'_>, first_block: u64) -> Result<u64> {
    let check = Check("repack");
    let ty = w.ty();
    let block_bytes = ty.block_bytes();
    check.that("raw", raw.len().is_multiple_of(block_bytes), "not whole blocks")?;
    let n_blocks = (raw.len() / block_bytes) as u64;
    let end = first_block.checked_add(n_blocks);
    check.that("w", end.is_some_and(|end| end <= w.n_blocks()), "has fewer blocks")?;
    if n_blocks == 0 {
        return Ok(0);
    }
    if ty.block_elems() == 1 {
        let start = first_block as usize * block_bytes;
        device.copy_bytes(raw, w.data().part(start..start + raw.len())?)?;
        return Ok(2 * raw.len() as u64);
    }
    device.check_owner(raw)?;
    device.check_owner(w.data())?;
    check.aligned("raw", raw, 2)?;
    check.apart("w", w.data(), raw)?;

    let units = raw.len() / if block_bytes.is_multiple_of(2) { 2 } else { 1 };
    let Ok(blocks) = u32::try_from(units.div_ceil(FLAT_BLOCK as usize)) else {
        return check.fail("raw", "too large for one launch");
    };
    let launch = Launch::linear(blocks, FLAT_BLOCK);
    let args = (raw.ptr(), w.data().ptr_mut(), RepackParams { planes: w.planes(), first_block, n_blocks });
    macro_rules! launch {
        ($($ty:ident: $name:ident),+) => {
            match ty {
                // SAFETY: the grid has a lane for every unit; extents, alignment and overlap were checked
                // above, and `Matrix` has checked that `w` holds the planes.
                $(GgmlType::$ty => unsafe { device.launch(kernels::$name, launch, args)? },)+
                GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 => unreachable!("copied above"),
            }
        };
    }
    launch!(
        Q4K: repack_q4_k, Q5K: repack_q5_k, Q6K: repack_q6_k, Q8_0: repack_q8_0, Q4_0: repack_q4_0,
        Q4_1: repack_q4_1, Q5_0: repack_q5_0, Q5_1: repack_q5_1, Mxfp4: repack_mxfp4
    );
    Ok(2 * raw.len() as u64)
}
