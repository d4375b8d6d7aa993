//! The CUDA driver.
