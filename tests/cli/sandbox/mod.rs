//! `exuvia sandbox …` against servers: a double that says what a test wants, and the real one.

mod code;
mod double;
mod full;
mod hostile;
mod other;
mod real;
mod streams;
mod terminal;
