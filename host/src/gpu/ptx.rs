//! The kernels' PTX, embedded when the crate was built: a module for each target.

use std::io::Read as _;

use flate2::read::ZlibDecoder;

/// One compiled kernel module.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedPtx {
    /// The `.target`, such as `sm_90`.
    pub target: &'static str,
    /// Of the text the lines with `.version`, `.target` and `.entry`.
    pub directives: &'static str,
    /// The text, packed.
    zlib: &'static [u8],
}

impl EmbeddedPtx {
    /// The PTX text: some 16 MB.
    pub fn text(&self) -> String {
        let mut text = String::new();
        ZlibDecoder::new(self.zlib).read_to_string(&mut text).expect("the build script packed a text");
        text
    }
}

// `PTX: &[EmbeddedPtx]` and `WITHOUT_PTX: Option<&str>`, written by the build script.
include!(concat!(env!("OUT_DIR"), "/embedded_ptx.rs"));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::ptx::Header;

    #[test]
    fn there_are_modules_or_a_reason_why_not() {
        assert_eq!(PTX.is_empty(), WITHOUT_PTX.is_some());
    }

    #[test]
    fn the_directives_say_what_the_text_says() {
        for ptx in PTX {
            let header = Header::parse(ptx.directives).expect("a header");
            assert_eq!(Header::parse(&ptx.text()).as_ref(), Ok(&header));
            assert_eq!(header.target.to_string(), ptx.target);
        }
    }
}
