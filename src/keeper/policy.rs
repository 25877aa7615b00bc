//! How long things may last, as the configuration says it.

use std::fmt;
use std::str::FromStr;

/// A length of time: a whole number and one of `s`, `m`, `h`, `d`, `w`, `y` (365 days).
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Duration {
    seconds: u64,
}

impl Duration {
    /// In seconds.
    pub fn as_secs(self) -> u64 {
        self.seconds
    }
}

impl FromStr for Duration {
    type Err = NotADuration;

    fn from_str(text: &str) -> Result<Self, NotADuration> {
        let unit = text.chars().next_back().ok_or(NotADuration)?;
        let seconds: u64 = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            'd' => 86_400,
            'w' => 7 * 86_400,
            'y' => 365 * 86_400,
            _ => return Err(NotADuration),
        };
        let digits = &text[..text.len() - unit.len_utf8()];
        if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return Err(NotADuration);
        }
        let count: u64 = digits.parse().map_err(|_| NotADuration)?;
        Ok(Self { seconds: count.checked_mul(seconds).ok_or(NotADuration)? })
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}s", self.seconds)
    }
}

/// A text is no length of time.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("want a length of time: a whole number and s, m, h, d, w or y, as in \"35d\"")]
pub struct NotADuration;

/// What the configuration's `[policy]` says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Policy {
    /// How long a backup that can be restored may need an old key; not said, no key is destroyed.
    pub backup_horizon: Option<Duration>,
    /// How long an envelope may be held before it is stored.
    pub write_grace: Duration,
    /// How long a key seals before it should be rotated.
    pub cryptoperiod: Duration,
}

impl Default for Policy {
    /// None, an hour, two years.
    fn default() -> Self {
        Self {
            backup_horizon: None,
            write_grace: Duration { seconds: 3600 },
            cryptoperiod: Duration { seconds: 2 * 365 * 86_400 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_a_number_and_a_unit() {
        assert_eq!("35d".parse(), Ok(Duration { seconds: 35 * 86_400 }));
        assert_eq!("2y".parse(), Ok(Policy::default().cryptoperiod));
        for bad in ["", "d", "5", "-1d", "1.5h", "1 d", "1d ", "99999999999999999999d", "18446744073709551615y", "1é"]
        {
            assert_eq!(bad.parse::<Duration>(), Err(NotADuration), "{bad}");
        }
    }
}
