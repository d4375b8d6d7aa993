//! The operations a model is made of.
