//! Tensors of a GGUF file: what the header says about them, and their bytes.

use gpu_kernels::blocks::GgmlType;

use super::cursor::Cursor;
use super::error::{ErrorKind, Place};

/// What a file says about a tensor. All of it was checked when the file was opened: the dimensions are
/// positive, their product and `n_bytes` do not overflow, rows are whole blocks, and the bytes lie
/// inside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The tensor's name, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// Element type.
    pub ty: GgmlType,
    dims: [usize; 4],
    n_dims: usize,
    /// Index of the file of a split model; 0 for a single file.
    pub shard: usize,
    /// Where the data starts, in bytes from the start of that file.
    pub offset: usize,
    /// Size of the data in bytes.
    pub n_bytes: usize,
}

impl TensorInfo {
    /// The one to four dimensions, innermost (contiguous) first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.n_dims]
    }

    /// Elements in a row: the innermost dimension.
    pub fn cols(&self) -> usize {
        self.dims[0]
    }

    /// Rows: the product of all other dimensions.
    pub fn rows(&self) -> usize {
        self.dims[1..].iter().product()
    }

    /// Elements in the tensor.
    #[expect(clippy::arithmetic_side_effects, reason = "both products fit: `data_bytes` checked them")]
    pub fn n_elems(&self) -> usize {
        self.rows() * self.cols()
    }

    /// Bytes in a row.
    #[expect(clippy::arithmetic_side_effects, reason = "both products fit: `data_bytes` checked them")]
    pub fn row_bytes(&self) -> usize {
        self.cols() / self.ty.block_elems() * self.ty.block_bytes()
    }

    /// Reads one entry of a file's tensor table. `offset` is then still relative to the start of the
    /// data section; [`TensorInfo::place`] makes it absolute.
    pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<TensorInfo, ErrorKind> {
        let name = cursor.name()?.to_owned();
        cursor.place = Place::Tensor(name.clone());
        let n_dims = cursor.u32("dimension count")?;
        if !(1..=4).contains(&n_dims) {
            return Err(ErrorKind::DimCount { tensor: name, n_dims });
        }
        let n_dims = n_dims as usize;
        let mut dims = [1u64; 4];
        for dim in &mut dims[..n_dims] {
            *dim = cursor.u64("dimension")?;
        }
        let id = cursor.u32("tensor type")?;
        let offset = cursor.u64("data offset")?;
        let Some(ty) = GgmlType::from_id(id) else {
            return Err(ErrorKind::TensorType { tensor: name, id });
        };
        let n_bytes = match data_bytes(ty, dims) {
            Ok(n_bytes) => n_bytes,
            Err(problem) => return Err(problem.about(name, ty, &dims[..n_dims])),
        };
        // `n_bytes` fits isize, so each of the dimensions does too; the offset is checked by `place`.
        let dims = dims.map(|dim| dim as usize);
        Ok(TensorInfo { name, ty, dims, n_dims, shard: 0, offset: offset as usize, n_bytes })
    }

    /// Makes the offset absolute, and checks that it is aligned and that the data is in the file.
    pub(super) fn place(&mut self, data_start: usize, alignment: usize, file_bytes: usize) -> Result<(), ErrorKind> {
        if !self.offset.is_multiple_of(alignment) {
            return Err(ErrorKind::Misaligned {
                tensor: self.name.clone(),
                offset: self.offset as u64,
                alignment: alignment as u64,
            });
        }
        // Three numbers below 2^64: they fit 128 bits.
        let offset = (data_start as u128).saturating_add(self.offset as u128);
        if offset.saturating_add(self.n_bytes as u128) > file_bytes as u128 {
            return Err(ErrorKind::TensorData {
                tensor: self.name.clone(),
                offset,
                n_bytes: self.n_bytes as u64,
                present: file_bytes as u64,
            });
        }
        self.offset = self.offset.saturating_add(data_start);
        Ok(())
    }
}

/// Why dimensions have no size in bytes.
pub(super) enum Unsizable {
    Dims(&'static str),
    PartialBlock,
}

impl Unsizable {
    /// The same, about this tensor.
    pub(super) fn about(self, tensor: String, ty: GgmlType, dims: &[u64]) -> ErrorKind {
        match self {
            Unsizable::Dims(problem) => ErrorKind::Dims { tensor, dims: dims.to_vec(), problem },
            Unsizable::PartialBlock => ErrorKind::PartialBlock { tensor, ty, cols: dims[0] },
        }
    }
}

/// Size of a tensor in bytes: whole blocks along the innermost dimension, times the other dimensions.
pub(super) fn data_bytes(ty: GgmlType, dims: [u64; 4]) -> Result<usize, Unsizable> {
    if dims.contains(&0) {
        return Err(Unsizable::Dims("hold a zero"));
    }
    let block_elems = ty.block_elems() as u64;
    if !dims[0].is_multiple_of(block_elems) {
        return Err(Unsizable::PartialBlock);
    }
    let too_large = || Unsizable::Dims("are too large");
    // Both the element count and the byte count must fit: later code multiplies dimensions freely.
    let n_elems = dims.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim)).ok_or_else(too_large)?;
    let n_blocks = n_elems.checked_div(block_elems).ok_or_else(too_large)?;
    let n_bytes = n_blocks
        .checked_mul(ty.block_bytes() as u64)
        .filter(|&n| n.max(n_elems) <= isize::MAX as u64)
        .ok_or_else(too_large)?;
    usize::try_from(n_bytes).map_err(|_| too_large())
}

/// A tensor of an open file.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// What the header says.
    pub info: &'a TensorInfo,
    pub(super) data: &'a [u8],
}

impl<'a> Tensor<'a> {
    /// The `info.n_bytes` bytes of the tensor: rows one after the other, each in whole blocks.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// Elements in a row.
    pub fn cols(&self) -> usize {
        self.info.cols()
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.info.rows()
    }

    /// Bytes in a row.
    pub fn row_bytes(&self) -> usize {
        self.info.row_bytes()
    }

    /// The bytes of row `row`.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.data[row.saturating_mul(self.row_bytes())..][..self.row_bytes()]
    }
}
