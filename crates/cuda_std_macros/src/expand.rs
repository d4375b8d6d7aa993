//! What `#[kernel]` expands to.

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::{
    Error, FnArg, ItemFn, LitInt, Pat, Result, ReturnType, Safety, Type, meta::ParseNestedMeta, spanned::Spanned,
};

/// The arguments of the attribute; 0 means "not given".
#[derive(Default)]
pub(crate) struct Bounds {
    max_threads: u32,
    min_blocks: u32,
}

impl Bounds {
    pub(crate) fn parse(&mut self, meta: ParseNestedMeta<'_>) -> Result<()> {
        let field = if meta.path.is_ident("max_threads") {
            &mut self.max_threads
        } else if meta.path.is_ident("min_blocks") {
            &mut self.min_blocks
        } else {
            return Err(meta.error("expected `max_threads = N` or `min_blocks = N`"));
        };
        let value: LitInt = meta.value()?.parse()?;
        *field = value.base10_parse()?;
        if *field == 0 {
            return Err(Error::new(value.span(), "a launch bound is at least 1"));
        }
        Ok(())
    }
}

/// One parameter, once it is known to be fit for a kernel.
struct Param<'a> {
    pattern: &'a Pat,
    ty: &'a Type,
}

pub(crate) fn kernel(bounds: &Bounds, function: &ItemFn) -> Result<TokenStream> {
    let params = check(function)?;
    if bounds.min_blocks != 0 && bounds.max_threads == 0 {
        return Err(Error::new(function.sig.ident.span(), "`min_blocks` needs `max_threads`"));
    }
    let device = device(bounds, function);
    let host = host(bounds, function, &params);
    Ok(quote! { #device #host })
}

/// Refuses what cannot be a kernel, with the reason at the place.
fn check(function: &ItemFn) -> Result<Vec<Param<'_>>> {
    let sig = &function.sig;
    if !matches!(sig.safety, Safety::Unsafe(_)) {
        return Err(Error::new(
            sig.fn_token.span,
            "a kernel is an `unsafe fn`: its pointers are the launcher's promise",
        ));
    }
    if let Some(asyncness) = &sig.asyncness {
        return Err(Error::new(asyncness.span(), "a kernel cannot be async"));
    }
    if !sig.generics.params.is_empty() {
        return Err(Error::new(
            sig.generics.span(),
            "an entry point is one symbol: call a generic function from a kernel",
        ));
    }
    if let ReturnType::Type(_, ty) = &sig.output {
        return Err(Error::new(ty.span(), "a kernel returns nothing"));
    }
    sig.inputs.iter().map(param).collect()
}

fn param(input: &FnArg) -> Result<Param<'_>> {
    let FnArg::Typed(typed) = input else {
        return Err(Error::new(input.span(), "a kernel has no `self`"));
    };
    if !matches!(&*typed.pat, Pat::Ident(_)) {
        return Err(Error::new(typed.pat.span(), "a kernel parameter is a plain name"));
    }
    if let Type::Reference(reference) = &*typed.ty {
        return Err(Error::new(
            reference.span(),
            "pass a raw pointer: a reference is loaded with ld.global.nc, which may be moved across barriers",
        ));
    }
    Ok(Param { pattern: &typed.pat, ty: &typed.ty })
}

fn device(bounds: &Bounds, function: &ItemFn) -> TokenStream {
    let ItemFn { attrs, vis, sig, block, .. } = function;
    let (ident, inputs) = (&sig.ident, &sig.inputs);
    let body = unsafe_block(quote! { #block });
    let marker = (bounds.max_threads != 0).then(|| {
        let text = format!("// cuda_std.bounds {ident} {} {}", bounds.max_threads, bounds.min_blocks);
        quote! { #[cfg(target_arch = "nvptx64")] ::core::arch::global_asm!(#text); }
    });
    quote! {
        #marker
        #[cfg(target_arch = "nvptx64")]
        #(#attrs)*
        #[unsafe(no_mangle)]
        #vis unsafe extern "ptx-kernel" fn #ident(#inputs) { #body }
    }
}

fn host(bounds: &Bounds, function: &ItemFn, params: &[Param<'_>]) -> TokenStream {
    let ItemFn { attrs, vis, sig, block, .. } = function;
    let ident = &sig.ident;
    let name = ident.to_string();
    let max_threads = option(bounds.max_threads);
    let min_blocks = option(bounds.min_blocks);
    let patterns = params.iter().map(|p| p.pattern);
    let types: Vec<_> = params.iter().map(|p| p.ty).collect();
    let body = unsafe_block(quote! { #block });
    quote! {
        #[cfg(not(target_arch = "nvptx64"))]
        #(#attrs)*
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug)]
        #vis struct #ident;

        // SAFETY: the body is that of an `unsafe fn` kernel, whose author promised what `Kernel` asks.
        #[cfg(not(target_arch = "nvptx64"))]
        unsafe impl ::cuda_std::launch::Kernel for #ident {
            type Args = (#(#types,)*);
            const NAME: &'static str = #name;
            const MAX_THREADS: ::core::option::Option<u32> = #max_threads;
            const MIN_BLOCKS: ::core::option::Option<u32> = #min_blocks;

            unsafe fn run((#(#patterns,)*): Self::Args) {
                #body
            }
        }
    }
}

fn option(value: u32) -> TokenStream {
    match value {
        0 => quote! { ::core::option::Option::None },
        n => quote! { ::core::option::Option::Some(#n) },
    }
}

/// Wraps a body, so that a kernel of raw loads and stores is not one `unsafe {}` a line. The token
/// carries the macro's span, which keeps `clippy::undocumented_unsafe_blocks` for written blocks.
fn unsafe_block(body: TokenStream) -> TokenStream {
    let span = Span::mixed_site();
    let keyword = quote_spanned! { span => unsafe };
    quote! {
        #[allow(unused_unsafe)]
        #keyword #body
    }
}
