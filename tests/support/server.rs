//! Databases for tests: a fresh one on the server that `ci/with-server` started (or an SQLite file), servers of a
//! test's own, and a Galera cluster. What a test does behind our back goes by the database's own client.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "for tests; not every test uses every part"
)]

use std::env;
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Backend {
    Sqlite,
    Postgres,
    Mariadb,
}

impl Backend {
    /// The one that HARDWRAP_TEST_BACKEND names; SQLite without it.
    pub(crate) fn now() -> Self {
        match env::var("HARDWRAP_TEST_BACKEND").as_deref() {
            Err(env::VarError::NotPresent) | Ok("sqlite") => Self::Sqlite,
            Ok("postgres") => Self::Postgres,
            Ok("mariadb") => Self::Mariadb,
            other => panic!("HARDWRAP_TEST_BACKEND: want sqlite, postgres or mariadb: {other:?}"),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::Mariadb => "mariadb",
        }
    }
}

/// Where a server is, and who we are there: `postgres://hardwrap@127.0.0.1:12345`, without a database.
#[derive(Clone)]
struct Address {
    backend: Backend,
    base: String,
}

impl Address {
    /// From the URL of the administrator's database.
    fn new(url: &str) -> Self {
        let (base, _) = url.trim_end().rsplit_once('/').expect("the URL of a server names a database");
        let backend = match base.split_once("://") {
            Some(("postgres", _)) => Backend::Postgres,
            Some(("mysql", _)) => Backend::Mariadb,
            _ => panic!("neither postgres:// nor mysql://: {url}"),
        };
        Self { backend, base: base.to_owned() }
    }

    fn url(&self, database: &str) -> String {
        format!("{}/{database}", self.base)
    }

    /// The database that is always there.
    fn administrators(&self) -> &'static str {
        match self.backend {
            Backend::Postgres => "postgres",
            _ => "mysql",
        }
    }

    fn client(&self, database: &str) -> Command {
        if self.backend == Backend::Postgres {
            let mut psql = Command::new("psql");
            psql.args(["-X", "-q", "-At", "-v", "ON_ERROR_STOP=1"]).arg(self.url(database));
            return psql;
        }
        let (user, place) = self.base["mysql://".len()..].split_once('@').expect("user@host:port");
        let (host, port) = place.rsplit_once(':').expect("host:port");
        let mut mariadb = Command::new("mariadb");
        mariadb.args(["--no-defaults", "-N", "-B", "--raw", "--default-character-set=utf8mb4", "--protocol=tcp"]);
        mariadb.args(["-h", host, "-P", port, "-u", user, database]);
        mariadb
    }
}

/// Runs a client with SQL as its input.
fn run(mut client: Command, sql: &str) -> Output {
    let mut child = client
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{client:?}: {error}; install sqlite3, postgresql-client, mariadb-client"));
    let mut stdin = child.stdin.take().unwrap();
    thread::scope(|threads| {
        threads.spawn(move || {
            // One that fails before it reads closes the pipe.
            let _ = stdin.write_all(sql.as_bytes());
        });
        child.wait_with_output().unwrap()
    })
}

/// What was printed, if it went well.
fn printed(done: &Output, what: &str) -> String {
    assert!(done.status.success(), "{what}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

fn number(printed: &str, sql: &str) -> i64 {
    printed.trim_end().parse().unwrap_or_else(|_| panic!("want one number: {sql}: {printed}"))
}

/// A database of one test's own. It goes when its guard goes.
pub(crate) struct Database {
    place: Place,
    name: String,
}

enum Place {
    File(TempDir),
    Server(Address),
}

impl Database {
    /// A new, empty one on the backend of now.
    pub(crate) fn new() -> Self {
        let backend = Backend::now();
        if backend == Backend::Sqlite {
            return Self { place: Place::File(tempfile::tempdir().unwrap()), name: "test.db".to_owned() };
        }
        let server = env::var("HARDWRAP_TEST_SERVER").expect("HARDWRAP_TEST_SERVER is not set: run by ci/with-server");
        let address = Address::new(&server);
        assert_eq!(address.backend, backend, "HARDWRAP_TEST_SERVER and HARDWRAP_TEST_BACKEND");
        Self::on(address)
    }

    fn on(address: Address) -> Self {
        let name = format!("t{:016x}", random());
        let made = run(address.client(address.administrators()), &format!("CREATE DATABASE {name}"));
        printed(&made, "CREATE DATABASE");
        Self { place: Place::Server(address), name }
    }

    pub(crate) fn backend(&self) -> Backend {
        match &self.place {
            Place::File(_) => Backend::Sqlite,
            Place::Server(address) => address.backend,
        }
    }

    /// Its name on the server, or that of its file.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// As hardwrap takes it.
    pub(crate) fn url(&self) -> String {
        match &self.place {
            Place::File(dir) => format!("sqlite://{}", dir.path().join(&self.name).display()),
            Place::Server(address) => address.url(&self.name),
        }
    }

    /// Runs SQL and gives what was printed: a line for each row. Its columns are apart by `|` on SQLite and PostgreSQL,
    /// by a tab on MariaDB; NULL is nothing there, and `NULL` here.
    pub(crate) fn sql(&self, sql: &str) -> String {
        printed(&self.try_sql(sql), sql)
    }

    /// The same for what may fail: the first error ends it.
    pub(crate) fn try_sql(&self, sql: &str) -> Output {
        let client = match &self.place {
            Place::File(dir) => {
                let mut sqlite3 = Command::new("sqlite3");
                sqlite3.args(["-bail", "-cmd", ".timeout 10000"]).arg(dir.path().join(&self.name));
                sqlite3
            }
            Place::Server(address) => address.client(&self.name),
        };
        run(client, sql)
    }

    /// The number that a SELECT of one number gives.
    pub(crate) fn number(&self, sql: &str) -> i64 {
        number(&self.sql(sql), sql)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let Place::Server(address) = &self.place else { return };
        let name = &self.name;
        let client = || address.client(address.administrators());
        // What cannot be dropped, because the server is down or a prepared transaction holds it, goes with the server.
        if address.backend == Backend::Postgres {
            run(client(), &format!("DROP DATABASE {name} WITH (FORCE)"));
            return;
        }
        // MariaDB waits for whoever is in a transaction there: a day, if it is not told.
        let kills = run(
            client(),
            &format!("SELECT CONCAT('KILL ', id, ';') FROM information_schema.processlist WHERE db = '{name}'"),
        );
        for kill in String::from_utf8_lossy(&kills.stdout).lines() {
            run(client(), kill);
        }
        run(client(), &format!("SET lock_wait_timeout = 5; DROP DATABASE {name}"));
    }
}

/// A server of one test's own. It and its directory go when the guard goes, also when the test is killed.
pub(crate) struct Server {
    backend: Backend,
    settings: Vec<String>,
    /// `ci/server guard`: cleans up when its input ends.
    guard: Child,
    dir: TempDir,
}

impl Server {
    pub(crate) fn start(backend: Backend) -> Self {
        Self::start_with(backend, &[])
    }

    /// With settings beside those of `ci/server`, over which they win: `NAME=VALUE`.
    pub(crate) fn start_with(backend: Backend, settings: &[&str]) -> Self {
        // Short: a unix socket is to be in it.
        let dir = tempfile::Builder::new().prefix("hw").tempdir().unwrap();
        let guard = ci_server("guard", dir.path()).stdin(Stdio::piped()).spawn().unwrap();
        let settings = settings.iter().map(ToString::to_string).collect();
        let server = Self { backend, settings, guard, dir };
        server.start_again();
        server
    }

    /// Starts it after [`Self::stop`] or [`Self::kill`], with the same port, data and settings.
    pub(crate) fn start_again(&self) {
        self.tell(ci_server("start", self.dir()).arg(self.backend.name()).args(&self.settings));
    }

    /// Stops it in good order; its sessions end.
    pub(crate) fn stop(&self) {
        self.tell(&mut ci_server("stop", self.dir()));
    }

    /// `kill -9`. MariaDB may then have lost the last second's commits, unless it was started with
    /// `innodb_flush_log_at_trx_commit=2`.
    pub(crate) fn kill(&self) {
        self.tell(&mut ci_server("kill", self.dir()));
    }

    fn tell(&self, command: &mut Command) {
        printed(&command.output().unwrap(), "ci/server");
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The server's process, or the last one if it was stopped.
    pub(crate) fn pid(&self) -> u32 {
        fs::read_to_string(self.dir().join("pid")).unwrap().trim_end().parse().unwrap()
    }

    fn address(&self) -> Address {
        Address::new(&fs::read_to_string(self.dir().join("url")).unwrap())
    }

    /// The URL of one of its databases.
    pub(crate) fn url(&self, database: &str) -> String {
        self.address().url(database)
    }

    /// A new database on it.
    pub(crate) fn database(&self) -> Database {
        Database::on(self.address())
    }

    /// Runs SQL in the administrator's database; `USE` (MariaDB) and `\c` (PostgreSQL) lead to others. Output as that
    /// of [`Database::sql`].
    pub(crate) fn sql(&self, sql: &str) -> String {
        printed(&self.try_sql(sql), sql)
    }

    /// The same for what may fail.
    pub(crate) fn try_sql(&self, sql: &str) -> Output {
        let address = self.address();
        run(address.client(address.administrators()), sql)
    }

    /// The number that a SELECT of one number gives.
    pub(crate) fn number(&self, sql: &str) -> i64 {
        number(&self.sql(sql), sql)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }
}

fn ci_server(order: &str, dir: &Path) -> Command {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/ci/server"));
    command.arg(order).arg(dir);
    command
}

/// Three Galera nodes on this machine. They stop when the guard goes.
pub(crate) struct Cluster {
    nodes: Vec<Server>,
}

impl Cluster {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// With settings for every node.
    pub(crate) fn start_with(settings: &[&str]) -> Self {
        const PROVIDER: &str = "/usr/lib/galera/libgalera_smm.so";
        assert!(Path::new(PROVIDER).exists(), "{PROVIDER} is missing: install galera-4 and rsync");
        let ports = free_ports(9);
        let members: Vec<_> = ports[..3].iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let mut cluster = Self { nodes: Vec::new() };
        for i in 0..3 {
            let [group, state, transfer] = [ports[i], ports[3 + i], ports[6 + i]];
            let own = [
                "wsrep_on=ON".to_owned(),
                format!("wsrep_provider={PROVIDER}"),
                format!("wsrep_cluster_address=gcomm://{}", members.join(",")),
                "wsrep_cluster_name=hardwrap".to_owned(),
                format!("wsrep_node_name=node{i}"),
                "wsrep_node_address=127.0.0.1".to_owned(),
                "wsrep_sst_method=rsync".to_owned(),
                format!("wsrep_sst_receive_address=127.0.0.1:{transfer}"),
                format!(
                    "wsrep_provider_options=gmcast.listen_addr=tcp://127.0.0.1:{group};\
                     ist.recv_addr=127.0.0.1:{state};gcache.size=32M"
                ),
                "binlog_format=ROW".to_owned(),
                "innodb_autoinc_lock_mode=2".to_owned(),
            ];
            let mut all: Vec<_> = own.iter().map(String::as_str).chain(settings.iter().copied()).collect();
            if i == 0 {
                all.push(NEW_CLUSTER);
            }
            let mut node = Server::start_with(Backend::Mariadb, &all);
            // One that starts again joins the others.
            node.settings.retain(|setting| setting != NEW_CLUSTER);
            cluster.nodes.push(node);
            // One after the other: each copies its data from one that is there.
            for node in &cluster.nodes {
                wait_for_size(node, i + 1);
            }
        }
        cluster
    }

    pub(crate) fn node(&self, i: usize) -> &Server {
        &self.nodes[i]
    }

    /// Waits until node `i` answers as one of `size`.
    pub(crate) fn wait_for_size(&self, i: usize, size: usize) {
        wait_for_size(&self.nodes[i], size);
    }
}

const NEW_CLUSTER: &str = "wsrep-new-cluster";

/// Waits until the node takes part in a cluster of `size`, and answers.
fn wait_for_size(node: &Server, size: usize) {
    let began = Instant::now();
    loop {
        let state = node.sql(
            "SELECT group_concat(variable_value ORDER BY variable_name) FROM information_schema.global_status \
             WHERE variable_name IN ('wsrep_cluster_size', 'wsrep_local_state_comment', 'wsrep_ready')",
        );
        if state.trim_end() == format!("{size},Synced,ON") {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "want a cluster of {size}: {state}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Ports where nobody listens, below those that the system hands out to whoever connects.
fn free_ports(count: usize) -> Vec<u16> {
    let mut taken: Vec<TcpListener> = Vec::new();
    while taken.len() < count {
        let port = 10_000 + u16::try_from(random() % 22_000).unwrap();
        taken.extend(TcpListener::bind(("127.0.0.1", port)));
    }
    taken.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}
