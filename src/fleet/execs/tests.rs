//! Logs and their readers.
