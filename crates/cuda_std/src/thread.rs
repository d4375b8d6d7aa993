//! Which lane is this, and the barrier: rust-cuda's `thread`.

pub use crate::atomic::{block_fence, device_fence, system_fence};
pub use crate::block::{sync_threads, sync_threads_and, sync_threads_count, sync_threads_or};

macro_rules! registers {
    ($($(#[$doc:meta])* $name:ident = $intrinsic:ident, $field:ident[$axis:literal];)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        #[must_use]
        pub fn $name() -> u32 {
            #[cfg(target_arch = "nvptx64")]
            // SAFETY: reads a special register.
            let value = unsafe { core::arch::nvptx::$intrinsic() };
            #[cfg(not(target_arch = "nvptx64"))]
            let value = crate::emu::lane::current().$field()[$axis];
            value
        }
    )*};
}

registers! {
    /// This lane's place in its block, x.
    thread_idx_x = _thread_idx_x, thread_idx[0];
    /// This lane's place in its block, y.
    thread_idx_y = _thread_idx_y, thread_idx[1];
    /// This lane's place in its block, z.
    thread_idx_z = _thread_idx_z, thread_idx[2];
    /// This block's place in the grid, x.
    block_idx_x = _block_idx_x, block_idx[0];
    /// This block's place in the grid, y.
    block_idx_y = _block_idx_y, block_idx[1];
    /// This block's place in the grid, z.
    block_idx_z = _block_idx_z, block_idx[2];
    /// Lanes of a block, x.
    block_dim_x = _block_dim_x, block_dim[0];
    /// Lanes of a block, y.
    block_dim_y = _block_dim_y, block_dim[1];
    /// Lanes of a block, z.
    block_dim_z = _block_dim_z, block_dim[2];
    /// Blocks of the grid, x.
    grid_dim_x = _grid_dim_x, grid_dim[0];
    /// Blocks of the grid, y.
    grid_dim_y = _grid_dim_y, grid_dim[1];
    /// Blocks of the grid, z.
    grid_dim_z = _grid_dim_z, grid_dim[2];
}

/// This lane's place in its block, counted along x, then y, then z.
#[inline(always)]
#[must_use]
pub fn thread_index_in_block() -> u32 {
    thread_idx_x() + block_dim_x() * (thread_idx_y() + block_dim_y() * thread_idx_z())
}

/// This lane's place in a one-dimensional grid of one-dimensional blocks.
#[inline(always)]
#[must_use]
pub fn index_1d() -> u32 {
    block_idx_x() * block_dim_x() + thread_idx_x()
}

/// This lane's place in the grid: blocks in order, lanes within a block in order.
#[inline(always)]
#[must_use]
pub fn index() -> u32 {
    let block = block_idx_x() + grid_dim_x() * (block_idx_y() + grid_dim_y() * block_idx_z());
    block * (block_dim_x() * block_dim_y() * block_dim_z()) + thread_index_in_block()
}
