//! Text from elsewhere, made harmless where people read it.

use std::fmt::{self, Write};

/// A text as a terminal or a log may show it: a control character, a separator of lines and whatever turns the
/// direction of writing stands there as `\u{1b}`, everything else as it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Plain<'a>(pub &'a str);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| {
            let turns =
                matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
            if c.is_control() || turns { write!(f, "{}", c.escape_debug()) } else { f.write_char(c) }
        })
    }
}
