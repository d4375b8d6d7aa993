//! A kernel as the host sees it: a name, an argument tuple and a launch shape.

use core::ffi::c_void;

/// A GPU entry point. `#[kernel]` implements it, on a zero-sized type with the kernel's name.
///
/// # Safety
/// [`run`](Self::run) may touch memory only through this crate's accessors and, inside an emulated
/// launch, must be sound for every argument: that is what makes [`emu::Device::launch`] a safe function.
///
/// [`emu::Device::launch`]: crate::emu::Device::launch
pub unsafe trait Kernel: Copy + 'static {
    /// The parameter types in order, as a tuple.
    type Args: KernelArgs;
    /// The symbol in the PTX.
    const NAME: &'static str;
    /// The most lanes a block may have, where the kernel says so.
    const MAX_THREADS: Option<u32> = None;
    /// How many blocks are to fit on one multiprocessor, where the kernel says so.
    const MIN_BLOCKS: Option<u32> = None;

    /// Runs one lane.
    ///
    /// # Safety
    /// Only inside an emulated launch.
    unsafe fn run(args: Self::Args);
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Lanes of a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Whether the grid may start before the one ahead of it in the stream has ended (see [`pdl`](crate::pdl)).
    pub pdl: bool,
}

impl Launch {
    /// `blocks` blocks of `threads` lanes.
    #[must_use]
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0, pdl: false }
    }

    /// A grid of `[x, y, z]` blocks of `threads` lanes.
    #[must_use]
    pub const fn grid(grid: [u32; 3], threads: u32) -> Self {
        Self { grid, block: [threads, 1, 1], shared_bytes: 0, pdl: false }
    }

    /// The same with `bytes` of dynamic shared memory a block.
    #[must_use]
    pub const fn shared(self, bytes: u32) -> Self {
        Self { shared_bytes: bytes, ..self }
    }

    /// The same as a programmatic dependent launch.
    #[must_use]
    pub const fn dependent(self) -> Self {
        Self { pdl: true, ..self }
    }

    /// Lanes of one block.
    #[must_use]
    pub const fn threads(&self) -> u64 {
        // The hardware's limit on each factor keeps the product within 64 bits for any u32 that it accepts.
        (self.block[0] as u64).saturating_mul(self.block[1] as u64).saturating_mul(self.block[2] as u64)
    }

    /// Blocks of the grid.
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        (self.grid[0] as u64).saturating_mul(self.grid[1] as u64).saturating_mul(self.grid[2] as u64)
    }
}

/// A kernel's arguments: a tuple of up to 25 raw pointers and plain scalars.
pub trait KernelArgs: Copy + 'static {
    /// Calls `f` with one pointer for each argument, as `cuLaunchKernel` takes them (`kernelParams`).
    /// They are valid during the call.
    fn with_params<R>(&self, f: impl FnOnce(&[*mut c_void]) -> R) -> R;
}

macro_rules! kernel_args {
    ($($name:ident)*) => {
        impl<$($name: Copy + 'static),*> KernelArgs for ($($name,)*) {
            #[inline]
            #[allow(non_snake_case, reason = "the type parameters' names serve as the variables'")]
            fn with_params<R>(&self, f: impl FnOnce(&[*mut c_void]) -> R) -> R {
                let ($($name,)*) = self;
                f(&[$(core::ptr::from_ref($name).cast_mut().cast()),*])
            }
        }
    };
}

kernel_args!();
kernel_args!(A);
kernel_args!(A B);
kernel_args!(A B C);
kernel_args!(A B C D);
kernel_args!(A B C D E);
kernel_args!(A B C D E F);
kernel_args!(A B C D E F G);
kernel_args!(A B C D E F G H);
kernel_args!(A B C D E F G H I);
kernel_args!(A B C D E F G H I J);
kernel_args!(A B C D E F G H I J K);
kernel_args!(A B C D E F G H I J K L);
kernel_args!(A B C D E F G H I J K L M);
kernel_args!(A B C D E F G H I J K L M N);
kernel_args!(A B C D E F G H I J K L M N O);
kernel_args!(A B C D E F G H I J K L M N O P);
kernel_args!(A B C D E F G H I J K L M N O P Q);
kernel_args!(A B C D E F G H I J K L M N O P Q S);
kernel_args!(A B C D E F G H I J K L M N O P Q S T);
kernel_args!(A B C D E F G H I J K L M N O P Q S T U);
kernel_args!(A B C D E F G H I J K L M N O P Q S T U V);
kernel_args!(A B C D E F G H I J K L M N O P Q S T U V W);
kernel_args!(A B C D E F G H I J K L M N O P Q S T U V W X);
kernel_args!(A B C D E F G H I J K L M N O P Q S T U V W X Y);
kernel_args!(A B C D E F G H I J K L M N O P Q S T U V W X Y Z);
