//! Text for people: tables, and secrets read from standard input.

use std::io::{self, Read, Write};

use hardwrap::store::Plain;
use zeroize::{Zeroize, Zeroizing};

/// Text from elsewhere, as a terminal may see it.
pub(crate) fn plain(text: &str) -> String {
    Plain(text).to_string()
}

/// Writes rows in columns as wide as their widest cell. The first row is the heading.
pub(crate) fn table(out: &mut dyn Write, rows: &[Vec<String>]) -> io::Result<()> {
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| plain(cell)).collect()).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', width - cell.chars().count() + 2));
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Reads everything, and wipes each buffer that was outgrown.
pub(crate) fn read_secret(input: &mut impl Read) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut secret = Zeroizing::new(vec![0; FIRST_BUFFER]);
    let mut length = 0;
    loop {
        if length == secret.len() {
            let mut larger = Zeroizing::new(vec![0; secret.len() * 2]);
            larger[..length].copy_from_slice(&secret);
            secret.zeroize();
            secret = larger;
        }
        match input.read(&mut secret[length..]) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    secret.truncate(length);
    Ok(secret)
}

const FIRST_BUFFER: usize = 64 * 1024;
