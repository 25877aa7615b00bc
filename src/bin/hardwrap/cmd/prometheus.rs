//! The text format that Prometheus reads (exposition format 0.0.4).

use std::fmt::Write as _;

/// Metrics, each with its samples, in the order they were added.
#[derive(Default)]
pub(super) struct Exposition(String);

impl Exposition {
    /// Adds a gauge; nothing where it has no samples.
    pub(super) fn gauge(&mut self, name: &str, help: &str, samples: &[(Vec<(&str, &str)>, u64)]) {
        if samples.is_empty() {
            return;
        }
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (labels, value) in samples {
            let labels: Vec<String> =
                labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let _ = writeln!(self.0, "{name}{labels} {value}");
        }
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

/// The value of a label: a backslash, a quote and a newline are escaped, nothing else may be.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}
