//! A model without weights.
