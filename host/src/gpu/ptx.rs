//! The kernels' PTX, embedded when the crate was built: a module for each target.

/// One compiled kernel module.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedPtx {
    /// The `.target`, such as `sm_90`.
    pub target: &'static str,
    /// The PTX text.
    pub text: &'static str,
}

// `PTX: &[EmbeddedPtx]` and `WITHOUT_PTX: Option<&str>`, written by the build script.
include!(concat!(env!("OUT_DIR"), "/embedded_ptx.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_modules_or_a_reason_why_not() {
        assert_eq!(PTX.is_empty(), WITHOUT_PTX.is_some());
        assert!(PTX.iter().all(|ptx| ptx.text.contains(&format!(".target {}", ptx.target))));
    }
}
