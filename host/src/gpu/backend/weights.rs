//! Weights on the device, and their way there.

use std::sync::Arc;

use gpu_kernels::blocks::GgmlType;

use super::{GpuBackend, Result, allocating, device_error, op_error};
use crate::backend::Error;
use crate::cpu::dequant::dequantize_row;
use crate::gguf;
use crate::gpu::device::Device;
use crate::gpu::memory::Buffer;
use crate::gpu::ops;
use crate::gpu::staging::Staging;

/// Pinned buffers that the weights go through: the host fills one while the device copies the other.
const N_CHUNKS: usize = 2;

/// A weight matrix, or a stack of expert matrices, in the planar layout of its type.
pub struct Matrix<D: Device> {
    data: Arc<Buffer<D, u8>>,
    ty: GgmlType,
    n_expert: u32,
    rows: u32,
    cols: u32,
}

/// f32 parameters.
pub struct Vector<D: Device> {
    pub(super) data: Arc<Buffer<D, f32>>,
}

impl<D: Device> Matrix<D> {
    /// As the launchers take it.
    pub(super) fn view(&self) -> Result<ops::Matrix<'_>> {
        ops::Matrix::new(self.data.slice(), self.ty, self.n_expert, self.rows, self.cols).map_err(op_error)
    }
}

/// Weights under way: pinned buffers, and the place on the device where blocks lie before they are repacked.
pub(super) struct Loader<D: Device> {
    staging: Staging<D>,
    raw: Buffer<D, u8>,
}

impl<D: Device> Loader<D> {
    fn new(device: &D, bytes: usize) -> Result<Self> {
        let staging = Staging::new(device, bytes, N_CHUNKS).map_err(|e| allocating("staging", e))?;
        Ok(Loader { staging, raw: device.alloc(bytes).map_err(|e| allocating("staging", e))? })
    }

    /// Streams `from`, whole blocks of the file, into `to`.
    ///
    /// One place for raw blocks is enough: the stream runs copies and repacking in order, and repacking takes
    /// a fortieth of the time of the copy.
    fn load(&mut self, device: &D, from: &[u8], to: ops::Matrix<'_>) -> Result {
        let block_bytes = to.ty().block_bytes();
        let chunk_bytes = self.raw.len() / block_bytes * block_bytes;
        for (i, chunk) in from.chunks(chunk_bytes).enumerate() {
            let raw = self.raw.part(..chunk.len()).map_err(device_error)?;
            self.staging.upload(device, raw, chunk).map_err(device_error)?;
            let first_block = (i * (chunk_bytes / block_bytes)) as u64;
            ops::repack(device, raw, to, first_block).map_err(op_error)?;
        }
        Ok(())
    }
}

impl<D: Device> GpuBackend<D> {
    pub(super) fn load_matrix(&mut self, tensor: &gguf::Tensor<'_>) -> Result<Matrix<D>> {
        let info = tensor.info;
        let (rows, n_expert) = match *info.dims() {
            [_] => (1, 1),
            [_, rows] => (rows, 1),
            [_, rows, n_expert] => (rows, n_expert),
            _ => return Err(Error::Unsupported(format!("tensor {:?} has four dimensions", info.name))),
        };
        let unsupported = || {
            let (cols, ty) = (info.cols(), info.ty);
            Error::Unsupported(format!("no GPU kernel takes {n_expert} matrices [{rows}, {cols}] of {ty}"))
        };
        let size = |n: usize| u32::try_from(n).map_err(|_| unsupported());
        let (n_expert, rows, cols) = (size(n_expert)?, size(rows)?, size(info.cols())?);
        let bytes = ops::Matrix::size_bytes(info.ty, n_expert, rows, cols).ok_or_else(unsupported)?;
        let bytes = usize::try_from(bytes).map_err(|_| unsupported())?;
        let data = self.keep("weights", bytes)?;
        let matrix = Matrix { data, ty: info.ty, n_expert, rows, cols };
        self.loading = true;
        if self.loader.is_none() {
            self.loader = Some(Loader::new(&*self.device, self.options.staging_bytes.max(info.ty.block_bytes()))?);
        }
        let loader = self.loader.as_mut().expect("made above");
        loader.load(&self.device, tensor.data(), matrix.view()?)?;
        Ok(matrix)
    }

    pub(super) fn load_vector(&mut self, tensor: &gguf::Tensor<'_>) -> Result<Vector<D>> {
        let mut values = vec![0.0; tensor.info.n_elems()];
        dequantize_row(tensor.info.ty, tensor.data(), &mut values);
        let data = self.keep("parameters", values.len())?;
        self.device.upload(data.slice(), &values).map_err(device_error)?;
        Ok(Vector { data })
    }

    /// Frees what only loading needs.
    pub(super) fn end_loading(&mut self) -> Result {
        if let Some(mut loader) = self.loader.take() {
            loader.staging.finish(&self.device).map_err(device_error)?;
        }
        // From here on a product may load weights before the kernel ahead of it has ended.
        self.device.synchronize().map_err(device_error)?;
        self.loading = false;
        Ok(())
    }
}
