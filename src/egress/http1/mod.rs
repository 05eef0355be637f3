//! HTTP/1 as far as the border must not leave it to a library: strict heads, strict framing, and a stream that shows a library
//! only what has passed both.

mod checked;
mod framing;
mod head;

pub use checked::{Checked, Gate, Stop};
pub use head::{Head, Violation, parse};
