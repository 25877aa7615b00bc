//! Where a database is.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use zeroize::Zeroizing;

/// The address of a database:
///
/// - `sqlite://relative.db` or `sqlite:///absolute.db`. What follows `sqlite://` is the path as it is: nothing in it is
///   decoded.
/// - `postgres://USER@HOST:PORT/DATABASE?sslmode=verify-full&sslrootcert=FILE`: whatever libpq takes as a URI, and what
///   its environment says (`PGPASSWORD`, `PGPASSFILE`, …). Also `postgresql://`.
/// - `mysql://USER@HOST:PORT/DATABASE?ssl_mode=verify_identity&ssl_ca=FILE`, or with `unix_socket=PATH` and the host
///   `localhost`. The password may come from `MYSQL_PWD`. Also `mariadb://`.
///
/// User, password, host and parameters are percent-encoded where they hold other signs than letters and digits. Neither
/// `Display` nor `Debug` can show a password.
#[derive(Clone, Eq, PartialEq)]
pub struct DatabaseUrl(Place);

#[derive(Clone, Eq, PartialEq)]
pub(super) enum Place {
    Sqlite(PathBuf),
    Postgres(Server),
    Mariadb(Server),
}

/// A server's address. It may hold a password, and is wiped on drop.
#[derive(Clone, Eq, PartialEq)]
pub(super) struct Server {
    /// What stands before the `@`: user, or user and password.
    user: Zeroizing<String>,
    /// Hosts with ports, and the database.
    rest: String,
    /// What stands behind the `?`: it may hold a password, too.
    parameters: Zeroizing<String>,
}

impl DatabaseUrl {
    /// The file, where the database is one.
    pub fn path(&self) -> Option<&Path> {
        match &self.0 {
            Place::Sqlite(path) => Some(path),
            Place::Postgres(_) | Place::Mariadb(_) => None,
        }
    }

    /// Whether a server keeps the database.
    pub fn is_server(&self) -> bool {
        self.path().is_none()
    }

    pub(super) fn place(&self) -> &Place {
        &self.0
    }
}

impl Server {
    /// The address as the client library wants it, with its password.
    pub(super) fn connect_by(&self, scheme: &str) -> Zeroizing<String> {
        let mut user = self.user.clone();
        if scheme == "mysql"
            && !user.contains(':')
            && let Ok(password) = env::var("MYSQL_PWD")
        {
            let encoded = Zeroizing::new(percent_encoded(Zeroizing::new(password).as_bytes()));
            user.push(':');
            user.push_str(&encoded);
        }
        let at = if user.is_empty() { "" } else { "@" };
        let question = if self.parameters.is_empty() { "" } else { "?" };
        Zeroizing::new(format!("{scheme}://{}{at}{}{question}{}", *user, self.rest, *self.parameters))
    }

    /// The value of a parameter, as it is written.
    pub(super) fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters
            .split('&')
            .filter_map(|one| one.split_once('='))
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value)
    }

    fn parse(rest: &str) -> Result<Self, BadUrl> {
        let (place, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let (user, rest) = place.rsplit_once('@').unwrap_or(("", place));
        let database = rest.split_once('/').map_or("", |(_, database)| database);
        let plain = |text: &str| !text.contains(|c: char| c.is_control() || c.is_whitespace());
        if database.is_empty()
            || database.contains('/')
            || rest.contains('#')
            || ![user, rest, parameters].into_iter().all(plain)
        {
            return Err(BadUrl::Server);
        }
        Ok(Self {
            user: Zeroizing::new(user.to_owned()),
            rest: rest.to_owned(),
            parameters: Zeroizing::new(parameters.to_owned()),
        })
    }

    /// Without password and parameters.
    fn show(&self, scheme: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.user.split(':').next().unwrap_or_default();
        let at = if name.is_empty() { "" } else { "@" };
        write!(f, "{scheme}://{name}{at}{}", self.rest)
    }
}

/// Every byte but letters and digits as `%XX`.
pub(super) fn percent_encoded(bytes: &[u8]) -> String {
    let mut encoded = String::new();
    for byte in bytes {
        match *byte {
            b'/' | b'-' | b'_' | b'.' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => encoded.push(char::from(*byte)),
            byte => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

impl FromStr for DatabaseUrl {
    type Err = BadUrl;

    fn from_str(text: &str) -> Result<Self, BadUrl> {
        let (scheme, rest) = text.split_once("://").ok_or(BadUrl::NoScheme)?;
        match scheme {
            "sqlite" if cfg!(feature = "sqlite") => {
                if rest.is_empty() || rest.starts_with(':') || rest.contains(['?', '#', '\0']) {
                    return Err(BadUrl::Path);
                }
                Ok(Self(Place::Sqlite(rest.into())))
            }
            "postgres" | "postgresql" if cfg!(feature = "postgres") => Ok(Self(Place::Postgres(Server::parse(rest)?))),
            "mysql" | "mariadb" if cfg!(feature = "mariadb") => Ok(Self(Place::Mariadb(Server::parse(rest)?))),
            _ => {
                // A scheme is short and plain; anything else may be a piece of a password and is not repeated.
                let plain = scheme.len() <= 16 && scheme.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'+');
                Err(BadUrl::Scheme(if plain { scheme.to_owned() } else { "?".to_owned() }))
            }
        }
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Place::Sqlite(path) => write!(f, "sqlite://{}", path.display()),
            Place::Postgres(server) => server.show("postgres", f),
            Place::Mariadb(server) => server.show("mysql", f),
        }
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DatabaseUrl({self})")
    }
}

/// The schemes that this build knows.
const KNOWN: &str = if cfg!(all(feature = "sqlite", feature = "postgres", feature = "mariadb")) {
    "sqlite://, postgres:// and mysql://"
} else if cfg!(all(feature = "sqlite", feature = "postgres")) {
    "sqlite:// and postgres://"
} else if cfg!(all(feature = "sqlite", feature = "mariadb")) {
    "sqlite:// and mysql://"
} else if cfg!(all(feature = "postgres", feature = "mariadb")) {
    "postgres:// and mysql://"
} else if cfg!(feature = "sqlite") {
    "sqlite://"
} else if cfg!(feature = "postgres") {
    "postgres://"
} else {
    "mysql://"
};

/// A text is no address of a database. Never repeats the text: it may hold a password.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum BadUrl {
    /// There is no `://`.
    #[error("a database URL starts with its scheme, as in sqlite://app.db")]
    NoScheme,
    /// This build does not know the scheme.
    #[error("no database {0}:// in this build: it has {KNOWN}")]
    Scheme(String),
    /// The path is empty, in memory, or followed by options.
    #[error(
        "sqlite:// is followed by the path of a file, without options: sqlite://app.db or sqlite:///var/lib/app.db"
    )]
    Path,
    /// There is no database, or a sign stands there that must be percent-encoded.
    #[error(
        "a server's URL is SCHEME://USER@HOST:PORT/DATABASE, signs other than letters and digits percent-encoded: \
         postgres://app@db.example:5432/app"
    )]
    Server,
}

#[cfg(all(test, feature = "postgres", feature = "mariadb"))]
mod tests {
    use super::*;

    #[test]
    fn no_password_is_shown_wherever_it_stands() {
        for url in [
            "postgres://app:s3cret@db.example:5432/app?password=s3cret&sslmode=require",
            "postgresql://app:s3cret@h1,h2:5433/app?sslpassword=s3cret",
            "mysql://app:s3cret@127.0.0.1/app?ssl_mode=required&x=s3cret",
            "mariadb://app:s3c@ret@127.0.0.1/app",
        ] {
            let parsed: DatabaseUrl = url.parse().expect("a URL");
            let shown = format!("{parsed} {parsed:?}");
            assert!(!shown.contains("s3c") && shown.contains("app@"), "{shown}");
        }
        assert!(matches!("mysql://app:s3cret@h/".parse::<DatabaseUrl>(), Err(BadUrl::Server)));
        assert!(!format!("{:?}", "postgres://app:s3cret@h/a/b".parse::<DatabaseUrl>()).contains("s3cret"));
    }

    #[test]
    fn the_whole_address_goes_to_the_client() {
        let url: DatabaseUrl = "postgresql://app:s%40@h1,h2:5433/app?sslmode=require".parse().expect("a URL");
        let Place::Postgres(server) = url.place() else { panic!("not PostgreSQL") };
        assert_eq!(*server.connect_by("postgres"), "postgres://app:s%40@h1,h2:5433/app?sslmode=require");
        assert_eq!(server.parameter("sslmode"), Some("require"));
    }
}
