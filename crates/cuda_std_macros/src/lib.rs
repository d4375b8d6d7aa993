//! The `#[kernel]` attribute of `cuda_std`. Use it as `cuda_std::kernel`.

mod expand;

use proc_macro::TokenStream;
use syn::{ItemFn, parse_macro_input};

/// Marks an `unsafe fn` as a GPU entry point.
///
/// ```text
/// /// `y[i] = a·x[i] + y[i]`. Grid: one lane an element.
/// #[kernel(max_threads = 256, min_blocks = 4)]
/// pub unsafe fn axpy(a: f32, x: *const f32, y: *mut f32, n: u32) { … }
/// ```
///
/// - On nvptx64 it becomes `#[unsafe(no_mangle)] pub unsafe extern "ptx-kernel" fn axpy(…)`.
/// - Elsewhere it becomes a zero-sized type `axpy` that implements `cuda_std::launch::Kernel`: its
///   name, its argument tuple and its body, for the driver and for the emulator.
///
/// The body is an unsafe block: the `# Safety` section of the kernel is its only contract, and the
/// launcher answers for it. Parameters are raw pointers and plain-old-data scalars. A reference is
/// refused, since the compiler would turn it into `ld.global.nc`, which may be moved across barriers
/// and across the wait of a dependent launch.
///
/// Arguments, both optional:
/// - `max_threads = N`: the most lanes a block may have (`.maxntid`);
/// - `min_blocks = N`: blocks that should fit on one multiprocessor (`.minnctapersm`).
///
/// Rust has no launch-bounds attribute, so they leave the compiler as a comment in the PTX,
/// `// cuda_std.bounds NAME MAX_THREADS MIN_BLOCKS`, and `cuda_builder` writes the directives.
#[proc_macro_attribute]
pub fn kernel(args: TokenStream, item: TokenStream) -> TokenStream {
    let mut bounds = expand::Bounds::default();
    let parser = syn::meta::parser(|meta| bounds.parse(meta));
    parse_macro_input!(args with parser);
    let function = parse_macro_input!(item as ItemFn);
    expand::kernel(&bounds, &function).unwrap_or_else(|error| error.into_compile_error()).into()
}
