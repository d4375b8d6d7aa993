//! What nearly every kernel uses: `use cuda_std::prelude::*;`.

pub use crate::mem::{ld, st};
pub use crate::shared::{Shared, dynamic};
pub use crate::vector::{F32x2, F32x4, I32x2, I32x4, U32x2, U32x4};
pub use crate::{Pod, block, convert, int8, kernel, math, mem, shared, thread, warp};
