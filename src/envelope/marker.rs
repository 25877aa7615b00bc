//! The one recogniser: what a stored text claims to be. Reading, counting, rotating, discovery and the SQL prefixes
//! all ask here, and nothing else looks at a prefix.

/// What a stored text claims to be, by the marker it starts with. Case counts; so does a blank before it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Marker {
    /// `''`: no value, never sealed.
    Empty,
    /// `hw1:`, ours.
    Hw1,
    /// `hwN:`, a version this hardwrap does not know.
    HwOther,
    /// `nrv1:` or `v2:`, the ancestor's.
    Foreign,
    /// None of these: cleartext.
    None,
}

impl Marker {
    /// Recognises a stored text.
    pub fn of(stored: &str) -> Self {
        if stored.is_empty() {
            Self::Empty
        } else if stored.starts_with(Self::HW1) {
            Self::Hw1
        } else if Self::FOREIGN.iter().any(|marker| stored.starts_with(marker)) {
            Self::Foreign
        } else if other_version(stored) {
            Self::HwOther
        } else {
            Self::None
        }
    }

    /// The marker of this version.
    pub const HW1: &'static str = "hw1:";

    /// The markers of the ancestor's envelopes.
    pub const FOREIGN: [&'static str; 2] = ["nrv1:", "v2:"];
}

/// `hw`, decimal digits, a colon.
fn other_version(stored: &str) -> bool {
    stored
        .strip_prefix("hw")
        .and_then(|rest| rest.split_once(':'))
        .is_some_and(|(version, _)| !version.is_empty() && version.bytes().all(|c| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_and_blanks_count() {
        for (stored, marker) in [
            ("", Marker::Empty),
            ("hw1:", Marker::Hw1),
            ("hw1:anything", Marker::Hw1),
            ("HW1:0001", Marker::None),
            (" hw1:0001", Marker::None),
            ("hw1", Marker::None),
            ("hw2:0001", Marker::HwOther),
            ("hw10:", Marker::HwOther),
            ("hw01:", Marker::HwOther),
            ("hw:", Marker::None),
            ("hwx:", Marker::None),
            ("hw1x:", Marker::None),
            ("nrv1:e30=", Marker::Foreign),
            ("v2:e30=", Marker::Foreign),
            ("NRV1:e30=", Marker::None),
            ("V2:", Marker::None),
            ("{\"prompt\":\"hw1:\"}", Marker::None),
        ] {
            assert_eq!(Marker::of(stored), marker, "{stored}");
        }
    }
}
