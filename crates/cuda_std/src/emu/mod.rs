//! The emulated device: runs kernels on the host and reports what a GPU would let pass.
//!
//! ```
//! use cuda_std::{emu::Device, kernel, launch::Launch, mem::{ld, st}, thread};
//!
//! /// `y[i] += a·x[i]`.
//! ///
//! /// # Safety
//! /// One lane an element at least; `x` and `y` have `n` elements.
//! #[kernel]
//! pub unsafe fn axpy(a: f32, x: *const f32, y: *mut f32, n: u32) {
//!     let i = thread::index_1d();
//!     if i < n {
//!         let i = i as usize;
//!         st(y.add(i), a * ld(x.add(i)) + ld(y.add(i)));
//!     }
//! }
//!
//! let device = Device::new();
//! let x = device.upload(&[1.0f32, 2.0, 3.0]);
//! let y = device.upload(&[10.0f32; 3]);
//! device.launch(axpy, Launch::linear(1, 32), (2.0, x.as_ptr(), y.as_mut_ptr(), 3))?;
//! assert_eq!(y.to_vec(), [12.0, 14.0, 16.0]);
//!
//! // One element too many: an error with kernel, block, lane and line.
//! let fault = device.launch(axpy, Launch::linear(1, 32), (2.0, x.as_ptr(), y.as_mut_ptr(), 4)).unwrap_err();
//! assert_eq!((fault.kernel, fault.thread), ("axpy", [3, 0, 0]));
//! # Ok::<(), cuda_std::emu::Fault>(())
//! ```
//!
//! # How it runs
//! A lane is a coroutine with a stack of its own. It runs until it needs another lane, at a barrier or a
//! warp collective, or until it polls memory. Lanes of a block run on one host thread, in an order that the
//! [`Order`] of the device says; blocks are spread over host threads. So a kernel without races has one
//! result, whatever the order, and a test that runs it in several shows that.
//!
//! # What it reports
//! Everything comes back from [`Device::launch`] as a [`Fault`]:
//! - global memory: an access outside of every allocation, a misaligned one, a read of bytes that were never
//!   written;
//! - shared memory: the same, and two lanes at one byte, one of them writing, with nothing to order them;
//! - a barrier or warp collective that some of its lanes do not reach, or only after they have exited;
//! - lanes that poll for something that never comes; a panic (overflow, an array index) in a kernel.
//!
//! # What it does not model
//! Weak memory order between blocks, timing, the cache, rounding of the `.approx` instructions, and blocks
//! that wait for each other (a block runs to its end once it has begun). Global memory has no race detector:
//! compare runs of several orders instead.

mod block;
mod device;
mod fault;
pub(crate) mod lane;
mod memory;
mod order;
mod schedule;
mod shared;
pub(crate) mod warp;

pub use device::Device;
pub use fault::{Access, Fault, Space, What};
pub use memory::Buffer;
pub use order::Order;
