//! The four routes by which a token wraps and unwraps a DEK, and the trial that chooses one.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use cryptoki::error::RvError;
use cryptoki::mechanism::{Mechanism, MechanismType};
use cryptoki::object::{Attribute, KeyType, ObjectClass, ObjectHandle};
use cryptoki::session::Session;

use super::counted::Counted;
use super::error::Recovery;
use super::module::{Module, lock};
use super::raw::Cipher;
use super::{Ckr, Error};
use crate::provider::{Aad, Alg, BoundDek, ProviderError, WrappedBytes, random};
use crate::secret::Dek;

/// One session on one module: what a call to the token needs.
#[derive(Clone, Copy)]
pub(super) struct Access<'a> {
    pub(super) module: &'a Module,
    pub(super) session: &'a Session,
}

/// How a token wraps a DEK: the algorithm, and the calls that do it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Route {
    /// A256KW through `C_Encrypt`/`C_Decrypt`: no object, one exchange, no IV (NSS, kryoptic, Luna).
    KwEncrypt,
    /// A256GCMKW with the caller's IV: no object, one exchange (SoftHSM2).
    GcmCallerIv,
    /// A256KW through `C_WrapKey`/`C_UnwrapKey` and a session object that is always destroyed.
    KwWrap,
    /// A256GCMKW with an IV that the token makes and writes back; zero and repeated ones are refused.
    GcmTokenIv,
}

impl Route {
    /// All routes, best first: the order in which `auto` tries them.
    pub const ALL: [Self; 4] = [Self::KwEncrypt, Self::GcmCallerIv, Self::KwWrap, Self::GcmTokenIv];

    /// What it makes.
    pub fn alg(self) -> Alg {
        match self {
            Self::KwEncrypt | Self::KwWrap => Alg::A256Kw,
            Self::GcmCallerIv | Self::GcmTokenIv => Alg::A256GcmKw,
        }
    }

    /// Its name in the keyring record and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::KwEncrypt => "aes-kw-encrypt",
            Self::GcmCallerIv => "aes-gcm-caller-iv",
            Self::KwWrap => "aes-kw-wrap",
            Self::GcmTokenIv => "aes-gcm-token-iv",
        }
    }

    /// The usage a key needs for this route; everything else is off.
    pub(super) fn usage(self) -> Vec<Attribute> {
        let wraps = self == Self::KwWrap;
        vec![
            Attribute::Encrypt(!wraps),
            Attribute::Decrypt(!wraps),
            Attribute::Wrap(wraps),
            Attribute::Unwrap(wraps),
            Attribute::Sign(false),
            Attribute::Verify(false),
            Attribute::Derive(false),
        ]
    }

    /// The attributes that say whether a key of this route may wrap.
    pub(super) fn wrap_permission(self, may: bool) -> Attribute {
        if self == Self::KwWrap { Attribute::Wrap(may) } else { Attribute::Encrypt(may) }
    }

    /// The attributes that say whether a key of this route may unwrap.
    pub(super) fn unwrap_permission(self, may: bool) -> Attribute {
        if self == Self::KwWrap { Attribute::Unwrap(may) } else { Attribute::Decrypt(may) }
    }

    /// The mechanism a key of this route may be used with.
    pub(super) fn mechanism(self) -> MechanismType {
        match self.alg() {
            Alg::A256Kw => MechanismType::AES_KEY_WRAP,
            Alg::A256GcmKw => MechanismType::AES_GCM,
        }
    }

    /// Wraps `dek` under the key `key`, bound to `aad`.
    pub(super) fn wrap(
        self,
        access: Access<'_>,
        key: ObjectHandle,
        dek: &Dek,
        aad: &Aad,
    ) -> Result<WrappedBytes, Error> {
        let Access { module, session } = access;
        let functions = &module.functions;
        match self {
            Self::KwEncrypt => {
                let bound = BoundDek::new(dek, aad);
                let bytes = functions.encrypt(session, key, Cipher::KeyWrap, bound.expose())?;
                Ok(WrappedBytes::A256Kw(bytes))
            }
            Self::KwWrap => {
                let bound = BoundDek::new(dek, aad);
                let object = functions.create_secret(session, bound.expose())?;
                module.count_object();
                let wrapped = functions.wrap_key(session, key, object);
                functions.destroy(session, object)?;
                Ok(WrappedBytes::A256Kw(wrapped?))
            }
            Self::GcmCallerIv => {
                let mut iv = [0; 12];
                random(&mut iv).map_err(|_| Error::Answer(NO_RANDOM))?;
                let asked = iv;
                let bytes = functions.encrypt(session, key, Cipher::Gcm(&mut iv, aad), dek.expose())?;
                if iv != asked {
                    return Err(Error::Answer("the token put its own IV in place of ours: ask for aes-gcm-token-iv"));
                }
                Ok(WrappedBytes::A256GcmKw { iv, bytes })
            }
            Self::GcmTokenIv => {
                let mut iv = [0; 12];
                let bytes = functions.encrypt(session, key, Cipher::Gcm(&mut iv, aad), dek.expose())?;
                if iv == [0; 12] {
                    return Err(Error::Answer("the token made no IV of its own"));
                }
                let mut made = lock(&IVS_MADE);
                let seen = made.get_or_insert_default();
                if seen.len() >= IVS_KEPT {
                    seen.clear();
                }
                if !seen.insert(iv) {
                    return Err(Error::Answer("the token repeated an IV"));
                }
                Ok(WrappedBytes::A256GcmKw { iv, bytes })
            }
        }
    }

    /// Unwraps what a key of this route wrapped. The outer error is the token's, the inner one the row's.
    pub(super) fn unwrap(
        self,
        access: Access<'_>,
        key: ObjectHandle,
        wrapped: &WrappedBytes,
        aad: &Aad,
    ) -> Result<Result<Dek, ProviderError>, Error> {
        let Access { module, session } = access;
        let functions = &module.functions;
        match (self, wrapped) {
            (Self::KwEncrypt, WrappedBytes::A256Kw(bytes)) => {
                let bound = BoundDek::init(|out| functions.decrypt(session, key, Cipher::KeyWrap, bytes, out))?;
                Ok(bound.release(aad))
            }
            (Self::KwWrap, WrappedBytes::A256Kw(bytes)) => {
                let object = self::unwrap_object(access, key, bytes)?;
                module.count_object();
                let bound = BoundDek::init(|out| functions.read_value(session, object, out));
                functions.destroy(session, object)?;
                Ok(bound?.release(aad))
            }
            (Self::GcmCallerIv | Self::GcmTokenIv, WrappedBytes::A256GcmKw { iv, bytes }) => {
                let mut iv = *iv;
                Dek::init(|out| functions.decrypt(session, key, Cipher::Gcm(&mut iv, aad), bytes, out)).map(Ok)
            }
            // The envelope's algorithm is not the key's: whoever wrote it had not this key.
            _ => Ok(Err(ProviderError::Rejected)),
        }
    }

    /// Tries this route on throw-away keys: right length, right DEK, and a tampered DEK, another aad and another key
    /// refused. The error says what failed.
    pub(super) fn works(self, access: Access<'_>) -> Result<(), Error> {
        with_throw_away(self.usage(), access, |key| {
            with_throw_away(self.usage(), access, |other| self.works_with(access, [key, other]))
        })
    }

    /// Times wraps and unwraps under a throw-away key, for a quarter of a second at most.
    fn measure(self, access: Access<'_>) -> Result<Timing, Error> {
        with_throw_away(self.usage(), access, |key| {
            let dek = Dek::init(|bytes| random(bytes).map_err(|_| Error::Answer(NO_RANDOM)))?;
            let aad = Aad::new(b"hw1-trial\0".to_vec());
            let (mut wraps, mut unwraps) = (Vec::new(), Vec::new());
            let began = Instant::now();
            while wraps.is_empty() || wraps.len() < TIMES && began.elapsed() < MEASURED_AT_MOST {
                let start = Instant::now();
                let wrapped = self.wrap(access, key, &dek, &aad)?;
                wraps.push(start.elapsed());
                let start = Instant::now();
                let unwrapped = self.unwrap(access, key, &wrapped, &aad)?;
                unwraps.push(start.elapsed());
                if !unwrapped.is_ok_and(|again| again.expose() == dek.expose()) {
                    return Err(Error::Answer("unwrapping gave another DEK"));
                }
            }
            Ok(Timing { wrap: median(wraps), unwrap: median(unwraps) })
        })
    }

    fn works_with(self, access: Access<'_>, [key, other]: [ObjectHandle; 2]) -> Result<(), Error> {
        let dek = Dek::init(|bytes| random(bytes).map_err(|_| Error::Answer(NO_RANDOM)))?;
        let aad = Aad::new(b"hw1-trial\0".to_vec());
        let wrapped = self.wrap(access, key, &dek, &aad)?;
        // A second one: a token that repeats its IV shows it here.
        self.wrap(access, key, &dek, &aad)?;
        match self.unwrap(access, key, &wrapped, &aad)? {
            Ok(again) if again.expose() == dek.expose() => {}
            _ => return Err(Error::Answer("unwrapping gave another DEK")),
        }
        let mut tampered = wrapped.clone();
        match &mut tampered {
            WrappedBytes::A256Kw(bytes) => bytes[40] ^= 1,
            WrappedBytes::A256GcmKw { bytes, .. } => bytes[40] ^= 1,
        }
        let elsewhere = Aad::new(b"hw1-trial\0elsewhere".to_vec());
        for (key, wrapped, aad, accepted) in [
            (key, &tampered, &aad, "a tampered DEK was unwrapped"),
            (other, &wrapped, &aad, "a DEK was unwrapped by another key"),
            (key, &wrapped, &elsewhere, "a DEK was unwrapped for another aad"),
        ] {
            if let Ok(Ok(_)) = self.unwrap(access, key, wrapped, aad) {
                return Err(Error::Answer(accepted));
            }
        }
        Ok(())
    }
}

/// How a route did on throw-away keys.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RouteTrial {
    /// The route.
    pub route: Route,
    /// How long it takes, or why it does not work here.
    pub outcome: Result<Timing, String>,
}

/// What one wrap and one unwrap take on a token: medians.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Timing {
    /// Wrapping a DEK.
    pub wrap: Duration,
    /// Unwrapping it.
    pub unwrap: Duration,
}

impl RouteTrial {
    pub(super) fn of(access: Access<'_>, route: Route) -> Result<Self, Error> {
        let outcome = match route.works(access).and_then(|()| route.measure(access)) {
            Ok(timing) => Ok(timing),
            Err(error) if matches!(error.recovery(), Recovery::GiveUp | Recovery::Judge) => Err(error.to_string()),
            // That says nothing of the route.
            Err(error) => return Err(error),
        };
        Ok(Self { route, outcome })
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which routes may be taken for a new key.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Choice {
    /// The first of all that works.
    #[default]
    Auto,
    /// The first of one algorithm that works: `aes-kw`, `aes-gcm`.
    Alg(Alg),
    /// This one.
    Route(Route),
}

impl Choice {
    /// The routes to try, best first.
    pub fn routes(self) -> Vec<Route> {
        Route::ALL
            .into_iter()
            .filter(|route| match self {
                Self::Auto => true,
                Self::Alg(alg) => route.alg() == alg,
                Self::Route(one) => *route == one,
            })
            .collect()
    }
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "aes-kw" => Ok(Self::Alg(Alg::A256Kw)),
            "aes-gcm" => Ok(Self::Alg(Alg::A256GcmKw)),
            name => Route::ALL.into_iter().find(|route| route.name() == name).map(Self::Route).ok_or_else(|| {
                let names = Route::ALL.map(Route::name).join(", ");
                format!("want auto, aes-kw, aes-gcm, or one route: {names}")
            }),
        }
    }
}

/// `C_UnwrapKey` without `CKA_VALUE_LEN`, then with it where the token asks for it; the answer is remembered.
fn unwrap_object(access: Access<'_>, key: ObjectHandle, bytes: &[u8]) -> Result<cryptoki_sys::CK_OBJECT_HANDLE, Error> {
    let Access { module, session } = access;
    let with_length = module.wants_value_length();
    match module.functions.unwrap_key(session, key, bytes, with_length) {
        Err(Error::Call { ckr: Ckr(RvError::TemplateIncomplete | RvError::AttributeTypeInvalid), .. })
            if !with_length =>
        {
            let object = module.functions.unwrap_key(session, key, bytes, true)?;
            module.set_wants_value_length();
            Ok(object)
        }
        other => other,
    }
}

/// Lends a session key like a master key, but of no worth, with this usage; it is destroyed in every case.
pub(super) fn with_throw_away<T>(
    usage: Vec<Attribute>,
    access: Access<'_>,
    work: impl FnOnce(ObjectHandle) -> Result<T, Error>,
) -> Result<T, Error> {
    let mut template = vec![
        Attribute::Class(ObjectClass::SECRET_KEY),
        Attribute::KeyType(KeyType::AES),
        Attribute::ValueLen(32.into()),
        Attribute::Token(false),
        Attribute::Private(true),
        Attribute::Sensitive(true),
        Attribute::Extractable(false),
    ];
    template.extend(usage);
    let key = access.session.generate_key(&Mechanism::AesKeyGen, &template).counted("C_GenerateKey")?;
    access.module.count_object();
    let outcome = work(key);
    let destroyed = access.session.destroy_object(key).counted("C_DestroyObject");
    let done = outcome?;
    destroyed?;
    Ok(done)
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() / 2]
}

const TIMES: usize = 200;
const MEASURED_AT_MOST: Duration = Duration::from_millis(250);

/// Why nothing can be drawn.
pub(super) const NO_RANDOM: &str = "the operating system gave no random bytes";

/// The IVs that tokens made in this process; bounded.
static IVS_MADE: Mutex<Option<HashSet<[u8; 12]>>> = Mutex::new(None);
const IVS_KEPT: usize = 65_536;
