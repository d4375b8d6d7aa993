//! Requests in, tokens out.
