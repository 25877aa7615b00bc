//! PKCS#11 modules: each loaded and initialised once in a process, and never unloaded.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use cryptoki::context::{CInitializeArgs, CInitializeFlags, Pkcs11};
use cryptoki::error::{Error as CryptokiError, RvError};

use super::counted::Counted;
use super::forks::forks;
use super::pin::PinGuard;
use super::raw::Functions;
use super::token::TokenInfo;
use super::{Ckr, Error};
use crate::process::Own;

/// One loaded module. `C_Initialize` and `C_Finalize` are process-wide, so there is one of these for each file,
/// leaked on purpose: unloading or finalising at exit crashes more modules than it helps.
pub(super) struct Module {
    path: PathBuf,
    pkcs11: Pkcs11,
    pub(super) functions: Functions,
    arguments: Option<CString>,
    /// Everybody who calls the module holds this for reading; re-initialising holds it for writing.
    gate: RwLock<()>,
    initialised: Mutex<bool>,
    /// False where a host application had initialised the module before us.
    owned: AtomicBool,
    /// In a forked child: whether the parent owned the module. Some modules do not notice the fork and call themselves
    /// initialised; that copy is then ours.
    inherited: bool,
    /// Counts initialisations: a handle of an earlier one may by now name something else.
    epoch: AtomicU64,
    /// Session objects made since the last initialisation: SoftHSM2 keeps about 240 bytes of each until `C_Finalize`.
    objects: AtomicU64,
    /// Whether `C_UnwrapKey` wants `CKA_VALUE_LEN` here, as some tokens do and others refuse.
    wants_value_length: AtomicBool,
    pins: Mutex<HashMap<[String; 4], &'static Mutex<PinGuard>>>,
}

impl Module {
    /// The module at `path`, loaded if it is not yet, for [`Module::here`]. `arguments` go to `C_Initialize` as
    /// `pReserved`, which NSS needs.
    pub(super) fn load(path: &Path, arguments: Option<&str>) -> Result<&'static Own<Self>, Error> {
        let canonical = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let mut modules =
            lock(MODULES.get(|parents| Mutex::new(try_lock(parents).map(|all| all.clone()).unwrap_or_default())));
        if let Some(loaded) = modules.iter().find(|loaded| Self::here(loaded).path == canonical) {
            return match &Self::here(loaded).arguments {
                kept if kept.as_deref().map(CStr::to_bytes) == arguments.map(str::as_bytes) => Ok(loaded),
                _ => Err(Error::Arguments(path.to_owned())),
            };
        }
        let load = |error| Error::Load(path.to_owned(), error);
        let pkcs11 = Pkcs11::new(&canonical).map_err(load)?;
        let functions = Functions::load(&canonical).map_err(load)?;
        let arguments =
            arguments.map(CString::new).transpose().map_err(|_| Error::Answer("init arguments hold a NUL"))?;
        let module: &'static Own<Self> = Box::leak(Box::new(Own::new(
            forks,
            Self {
                path: canonical,
                pkcs11,
                functions,
                arguments,
                gate: RwLock::new(()),
                initialised: Mutex::new(false),
                owned: AtomicBool::new(false),
                inherited: false,
                epoch: AtomicU64::new(0),
                objects: AtomicU64::new(0),
                wants_value_length: AtomicBool::new(false),
                pins: Mutex::default(),
            },
        )));
        modules.push(module);
        Ok(module)
    }

    /// The module as this process has it: a forked child initialises it anew, with the same arguments.
    pub(super) fn here(loaded: &'static Own<Self>) -> &'static Self {
        loaded.get(Self::inherit)
    }

    fn inherit(parent: &Self) -> Self {
        // A PIN that the parent saw refused is not tried again; one that it was just trying is nobody's knowledge.
        let mut pins = try_lock(&parent.pins).map(|pins| pins.clone()).unwrap_or_default();
        pins.retain(|_, guard| try_lock(guard).is_some());
        Self {
            path: parent.path.clone(),
            pkcs11: parent.pkcs11.clone(),
            functions: parent.functions.clone(),
            arguments: parent.arguments.clone(),
            gate: RwLock::new(()),
            initialised: Mutex::new(false),
            owned: AtomicBool::new(false),
            inherited: parent.inherited || parent.owned.load(Ordering::Acquire),
            epoch: AtomicU64::new(parent.epoch()),
            objects: AtomicU64::new(0),
            wants_value_length: AtomicBool::new(parent.wants_value_length()),
            pins: Mutex::new(pins),
        }
    }

    /// Initialises the module if that is not done, and keeps it initialised while the guard lives.
    pub(super) fn enter(&'static self) -> Result<RwLockReadGuard<'static, ()>, Error> {
        let guard = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let mut initialised = lock(&self.initialised);
        if !*initialised {
            self.initialise()?;
            *initialised = true;
        }
        drop(initialised);
        Ok(guard)
    }

    /// The file it was loaded from, without links.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The PKCS#11 context. Call it only under [`Module::enter`].
    pub(super) fn pkcs11(&self) -> &Pkcs11 {
        &self.pkcs11
    }

    /// Finalises and initialises the module again, once nobody is inside: the only way to see tokens that came, and
    /// to get back what SoftHSM2 keeps. `seen` is the epoch in which the caller saw the need: if it is over,
    /// somebody else has done it.
    pub(super) fn reload(&'static self, seen: u64) -> Result<(), Error> {
        let _alone = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        if self.epoch() != seen {
            return Ok(());
        }
        let mut initialised = lock(&self.initialised);
        let host_owned = *initialised && !self.owned.load(Ordering::Acquire);
        if !host_owned {
            // An error of C_Finalize must not keep us from starting anew.
            let _ = self.pkcs11.clone().finalize().counted("C_Finalize");
        }
        // Where a host application owns the module, this succeeds only if the host has finalised it.
        *initialised = false;
        self.initialise()?;
        *initialised = true;
        if host_owned && !self.owned.load(Ordering::Acquire) { Err(Error::HostOwned) } else { Ok(()) }
    }

    /// How often the module has been initialised.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Notes that a session object was made.
    pub(super) fn count_object(&self) {
        self.objects.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether so many session objects were made that the module should be re-initialised to give their memory back.
    pub(super) fn is_bloated(&self) -> bool {
        self.objects.load(Ordering::Relaxed) >= OBJECTS_AT_MOST && self.owned.load(Ordering::Acquire)
    }

    /// Whether an unwrap template has to give the length.
    pub(super) fn wants_value_length(&self) -> bool {
        self.wants_value_length.load(Ordering::Relaxed)
    }

    /// Remembers that it has to.
    pub(super) fn set_wants_value_length(&self) {
        self.wants_value_length.store(true, Ordering::Relaxed);
    }

    /// The guard of one token's PIN: one for the whole process.
    pub(super) fn pin_guard(&self, token: &TokenInfo) -> &'static Mutex<PinGuard> {
        let who = [&token.manufacturer, &token.model, &token.serial, &token.label].map(String::clone);
        lock(&self.pins).entry(who).or_insert_with(|| Box::leak(Box::default()))
    }

    fn initialise(&self) -> Result<(), Error> {
        let flags = CInitializeFlags::OS_LOCKING_OK;
        let arguments = match &self.arguments {
            None => CInitializeArgs::new(flags),
            Some(text) => {
                let pointer = NonNull::new(text.as_ptr().cast_mut().cast()).expect("a CString's pointer is never null");
                #[expect(
                    unsafe_code,
                    reason = "pReserved: NSS takes its configuration as a C string, which `self` keeps"
                )]
                // SAFETY: the string lives as long as the module, and modules read it only.
                unsafe {
                    CInitializeArgs::new_with_reserved(flags, pointer)
                }
            }
        };
        let owned = match self.pkcs11.initialize(arguments).counted("C_Initialize") {
            Ok(()) => true,
            Err(CryptokiError::Pkcs11(RvError::CryptokiAlreadyInitialized, _)) => self.inherited,
            Err(CryptokiError::Pkcs11(ckr, function)) => return Err(Error::Call { function, ckr: Ckr(ckr) }),
            Err(error) => return Err(Error::Load(self.path.clone(), error)),
        };
        self.owned.store(owned, Ordering::Release);
        self.objects.store(0, Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
}

/// Locks; a panic elsewhere does not make the data wrong, since nothing here is left half changed.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks if nobody has it.
fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

static MODULES: Own<Mutex<Vec<&'static Own<Module>>>> = Own::of(forks, 0, Mutex::new(Vec::new()));

/// 16,384 objects are 4 MB in SoftHSM 2.6.1, and 0.7 s of wrapping by route 3; re-initialising takes a few ms.
const OBJECTS_AT_MOST: u64 = 16_384;
