//! A weight tensor on the device.

use gpu_kernels::blocks::GgmlType;
use gpu_kernels::layout::{self, MAX_PLANES, PLANE_ALIGN};

use super::{Check, Result};
use crate::gpu::memory::Slice;

/// Rows and columns that index arithmetic in 32 bits has room for (a lane's number is `32·row + lane`).
const MAX_ROWS: u32 = 1 << 26;
const MAX_COLS: u32 = 1 << 26;

/// Weights `[n_expert, rows, cols]` in the planar layout of their type, sizes checked.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    data: Slice<'a, u8>,
    ty: GgmlType,
    n_expert: u32,
    rows: u32,
    cols: u32,
    planes: [u64; MAX_PLANES],
}

impl<'a> Matrix<'a> {
    /// Weights in `data`, which has [`Matrix::size_bytes`] bytes. A plain matrix has one expert.
    ///
    /// # Errors
    /// [`OpError::Operand`](super::OpError::Operand) where a size is 0 or too large, `cols` is no multiple of the
    /// type's block (or of 16 bytes, for the float types), or `data` is too small or not aligned.
    pub fn new(data: Slice<'a, u8>, ty: GgmlType, n_expert: u32, rows: u32, cols: u32) -> Result<Self> {
        let check = Check("matrix");
        let Some((planes, bytes)) = Self::layout(ty, n_expert, rows, cols) else {
            return check.fail("w", format!("no {ty} tensor has the shape [{n_expert}, {rows}, {cols}]"));
        };
        check.aligned("w", data, PLANE_ALIGN)?;
        check.that("w", data.len() as u64 >= bytes, "smaller than its shape")?;
        Ok(Matrix { data, ty, n_expert, rows, cols, planes })
    }

    /// Bytes that such a tensor takes on the device; `None` where there can be none.
    pub fn size_bytes(ty: GgmlType, n_expert: u32, rows: u32, cols: u32) -> Option<u64> {
        Self::layout(ty, n_expert, rows, cols).map(|(_, bytes)| bytes)
    }

    fn layout(ty: GgmlType, n_expert: u32, rows: u32, cols: u32) -> Option<([u64; MAX_PLANES], u64)> {
        let unit = layout::chunk_elems(ty).max(ty.block_elems() as u32);
        let fits = n_expert > 0 && (1..=MAX_ROWS).contains(&rows) && (1..=MAX_COLS).contains(&cols);
        if !fits || !cols.is_multiple_of(unit) {
            return None;
        }
        let n_blocks =
            u64::from(n_expert).checked_mul(u64::from(rows))?.checked_mul(u64::from(cols) / ty.block_elems() as u64)?;
        Some((layout::plane_offsets(ty, n_blocks)?, layout::device_bytes(ty, n_blocks)?))
    }

    /// The bytes.
    pub fn data(&self) -> Slice<'a, u8> {
        self.data
    }
    /// The type.
    pub fn ty(&self) -> GgmlType {
        self.ty
    }
    /// Matrices in the tensor.
    pub fn n_expert(&self) -> u32 {
        self.n_expert
    }
    /// Rows of one matrix.
    pub fn rows(&self) -> u32 {
        self.rows
    }
    /// Elements of a row.
    pub fn cols(&self) -> u32 {
        self.cols
    }
    /// Where each plane starts.
    pub fn planes(&self) -> [u64; MAX_PLANES] {
        self.planes
    }
    /// 16-byte chunks in a row.
    pub fn chunks(&self) -> u32 {
        self.cols / layout::chunk_elems(self.ty)
    }
    /// Blocks of the tensor, as the file counts them.
    pub fn n_blocks(&self) -> u64 {
        u64::from(self.n_expert) * u64::from(self.rows) * (u64::from(self.cols) / self.ty.block_elems() as u64)
    }
    /// Bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        u64::from(self.cols) / self.ty.block_elems() as u64 * self.ty.block_bytes() as u64
    }
}
