//! A PKCS#11 2.40 module that forwards every call to a real module and goes wrong on request.
//!
//! Tests load it instead of the real module to see faults that no software token shows by itself.
//! Two environment variables are read when it is loaded:
//!
//! - `HARDWRAP_FAULT_MODULE`: the real module (default `/usr/lib/softhsm/libsofthsm2.so`);
//! - `HARDWRAP_FAULT`: the rules file, read again at every call, so that a running test changes its
//!   rules by rewriting it (by rename, where calls may run meanwhile). Without the variable or the
//!   file every call is forwarded as it came.
//!
//! A rule that cannot be understood, a rules file that cannot be read and a log that cannot be
//! written abort the process: no test may run without its fault. Functions of PKCS#11 3.x are not
//! there.
//!
//! # Rules
//!
//! One a line; what follows a word that starts with `#` is a comment.
//!
//! `FUNCTION WHEN ACTION` is about calls. `FUNCTION` is a name such as `C_Login`, or `any`. `WHEN` is
//! `*` for every call, or `3` for the third call of that function (of any function, for `any`),
//! counted from loading or from the last change of the file's content. `ACTION` is one of:
//!
//! | Action | The call |
//! |---|---|
//! | `0xb3` | answers this CKR and is not forwarded |
//! | `0xb3 after` | is forwarded, then answers this CKR although it was done |
//! | `sleep 200` | waits 200 milliseconds first |
//! | `kill` | is not forwarded: the process gets SIGKILL |
//! | `kill-after` | is forwarded, then the process gets SIGKILL |
//!
//! Several rules may match one call: sleeps add up, then `kill` comes first, and the first CKR wins.
//!
//! The other rules make another token of it:
//!
//! | Rule | The token |
//! |---|---|
//! | `token-iv random` | makes the GCM IV itself: an all-zero IV in the parameters of `C_EncryptInit` is overwritten |
//! | `token-iv repeat` | the same, but it is the same IV every time |
//! | `token-iv zero` | the same, but it is left zero |
//! | `sessions 1` | has this many sessions: one more is answered `CKR_SESSION_COUNT`; its token info says so |
//! | `token-info-clock-garbage` | claims a clock and fills `utcTime` with no digits, as openCryptoki does |
//! | `pin-flags low` | says that a wrong PIN was tried; also `final` (one try left) and `locked` |
//! | `no-data-objects` | refuses to create `CKO_DATA` with `CKR_ATTRIBUTE_VALUE_INVALID`, as NSS does |
//! | `no-kw` | answers `CKR_MECHANISM_INVALID` to `CKM_AES_KEY_WRAP`; its mechanism list is as before |
//! | `no-gcm` | the same for `CKM_AES_GCM` |
//! | `kw-encrypt` | takes `CKM_AES_KEY_WRAP` in `C_Encrypt` and `C_Decrypt`, as NSS, kryoptic and Luna do; see below |
//! | `notices-forks` | as openCryptoki does: in a forked child everything is `CKR_CRYPTOKI_NOT_INITIALIZED` until it calls `C_Initialize` itself, and then the sessions of its parent are no more |
//! | `log PATH` | appends a line `C_Login 0xa0` to `PATH` for every call, or `C_Login kill` for one that was killed |
//!
//! # `kw-encrypt`
//!
//! SoftHSM2 has AES Key Wrap in `C_WrapKey` and `C_UnwrapKey` only, so one call of `C_Encrypt` becomes
//! create, wrap, destroy; one of `C_Decrypt` becomes unwrap, read, destroy; a wrapping that does not verify is
//! `CKR_ENCRYPTED_DATA_INVALID`. These inner calls are neither counted nor logged. `CKA_ENCRYPT` and
//! `CKA_DECRYPT` are asked as the real token would ask them. Every key generated with `CKA_ENCRYPT` gets
//! `CKA_WRAP` and `CKA_UNWRAP` behind the scenes. Where the template says that they are false, the key is
//! marked with a `CKA_WRAP_TEMPLATE`, and seen through this rule it has neither of them: they read as false,
//! cannot be changed, and `C_WrapKey` and `C_UnwrapKey` refuse it.
#![expect(
    unsafe_code,
    reason = "a C interface: whoever calls a function vouches for its pointers, as for the real module, \
              which gets the same pointers"
)]
#![expect(non_snake_case, reason = "functions are called as PKCS#11 calls them")]
#![expect(clippy::too_many_arguments, reason = "signatures are those of PKCS#11")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::Display;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use std::{env, mem, process, ptr, slice, thread};

use cryptoki_sys::*;

type Session = CK_SESSION_HANDLE;
type Object = CK_OBJECT_HANDLE;
type Mechanism = *mut CK_MECHANISM;
type Template = *mut CK_ATTRIBUTE;
type Bytes = *mut CK_BYTE;
type Length = *mut CK_ULONG;

/// Calls a function of the real module.
macro_rules! forward {
    ($name:ident($($arg:expr),*)) => {
        match module().real.$name {
            Some(function) => unsafe { function($($arg),*) },
            None => CKR_FUNCTION_NOT_SUPPORTED,
        }
    };
}

/// Makes the function list. Each function asks the rules, then forwards, or goes through the handler named
/// behind its arrow.
macro_rules! functions {
    (@ $faults:ident $name:ident($($arg:ident),*)) => { forward!($name($($arg),*)) };
    (@ $faults:ident $name:ident($($arg:ident),*) $handler:ident) => { $handler($faults, $($arg),*) };
    ($($name:ident($($arg:ident: $type:ty),*) $(=> $handler:ident)?;)*) => {
        $(
            unsafe extern "C" fn $name($($arg: $type),*) -> CK_RV {
                call(stringify!($name), |_faults| functions!(@ _faults $name($($arg),*) $($handler)?))
            }
        )*

        /// The names that a rule may use.
        const NAMES: &[&str] = &[$(stringify!($name)),*];

        /// A list of all functions, as new as the real one says it is.
        fn function_list(version: CK_VERSION) -> CK_FUNCTION_LIST {
            CK_FUNCTION_LIST { version, C_GetFunctionList: Some(C_GetFunctionList), $($name: Some($name)),* }
        }
    };
}

/// Gives out the list of forwarding functions: the one way in.
///
/// # Safety
/// `list` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn C_GetFunctionList(list: *mut *mut CK_FUNCTION_LIST) -> CK_RV {
    if list.is_null() {
        return CKR_ARGUMENTS_BAD;
    }
    unsafe { list.write(ptr::from_ref(&module().ours).cast_mut()) };
    CKR_OK
}

functions! {
    C_Initialize(a: *mut c_void) => initialize;
    C_Finalize(a: *mut c_void) => finalize;
    C_GetInfo(a: *mut CK_INFO);
    C_GetSlotList(a: CK_BBOOL, b: *mut CK_SLOT_ID, c: Length);
    C_GetSlotInfo(a: CK_SLOT_ID, b: *mut CK_SLOT_INFO);
    C_GetTokenInfo(a: CK_SLOT_ID, b: *mut CK_TOKEN_INFO) => token_info;
    C_GetMechanismList(a: CK_SLOT_ID, b: *mut CK_MECHANISM_TYPE, c: Length);
    C_GetMechanismInfo(a: CK_SLOT_ID, b: CK_MECHANISM_TYPE, c: *mut CK_MECHANISM_INFO);
    C_InitToken(a: CK_SLOT_ID, b: Bytes, c: CK_ULONG, d: Bytes);
    C_InitPIN(a: Session, b: Bytes, c: CK_ULONG);
    C_SetPIN(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: CK_ULONG);
    C_OpenSession(a: CK_SLOT_ID, b: CK_FLAGS, c: *mut c_void, d: CK_NOTIFY, e: *mut Session) => open_session;
    C_CloseSession(a: Session) => close_session;
    C_CloseAllSessions(a: CK_SLOT_ID) => close_all_sessions;
    C_GetSessionInfo(a: Session, b: *mut CK_SESSION_INFO);
    C_GetOperationState(a: Session, b: Bytes, c: Length);
    C_SetOperationState(a: Session, b: Bytes, c: CK_ULONG, d: Object, e: Object);
    C_Login(a: Session, b: CK_USER_TYPE, c: Bytes, d: CK_ULONG);
    C_Logout(a: Session);
    C_CreateObject(a: Session, b: Template, c: CK_ULONG, d: *mut Object) => create_object;
    C_CopyObject(a: Session, b: Object, c: Template, d: CK_ULONG, e: *mut Object);
    C_DestroyObject(a: Session, b: Object);
    C_GetObjectSize(a: Session, b: Object, c: Length);
    C_GetAttributeValue(a: Session, b: Object, c: Template, d: CK_ULONG) => attribute_value;
    C_SetAttributeValue(a: Session, b: Object, c: Template, d: CK_ULONG) => set_attribute_value;
    C_FindObjectsInit(a: Session, b: Template, c: CK_ULONG);
    C_FindObjects(a: Session, b: *mut Object, c: CK_ULONG, d: Length);
    C_FindObjectsFinal(a: Session);
    C_EncryptInit(a: Session, b: Mechanism, c: Object) => encrypt_init;
    C_Encrypt(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length) => encrypt;
    C_EncryptUpdate(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length);
    C_EncryptFinal(a: Session, b: Bytes, c: Length);
    C_DecryptInit(a: Session, b: Mechanism, c: Object) => decrypt_init;
    C_Decrypt(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length) => decrypt;
    C_DecryptUpdate(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length);
    C_DecryptFinal(a: Session, b: Bytes, c: Length);
    C_DigestInit(a: Session, b: Mechanism);
    C_Digest(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length);
    C_DigestUpdate(a: Session, b: Bytes, c: CK_ULONG);
    C_DigestKey(a: Session, b: Object);
    C_DigestFinal(a: Session, b: Bytes, c: Length);
    C_SignInit(a: Session, b: Mechanism, c: Object);
    C_Sign(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length);
    C_SignUpdate(a: Session, b: Bytes, c: CK_ULONG);
    C_SignFinal(a: Session, b: Bytes, c: Length);
    C_SignRecoverInit(a: Session, b: Mechanism, c: Object);
    C_SignRecover(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length);
    C_VerifyInit(a: Session, b: Mechanism, c: Object);
    C_Verify(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: CK_ULONG);
    C_VerifyUpdate(a: Session, b: Bytes, c: CK_ULONG);
    C_VerifyFinal(a: Session, b: Bytes, c: CK_ULONG);
    C_VerifyRecoverInit(a: Session, b: Mechanism, c: Object);
    C_VerifyRecover(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length);
    C_DigestEncryptUpdate(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length);
    C_DecryptDigestUpdate(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length);
    C_SignEncryptUpdate(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length);
    C_DecryptVerifyUpdate(a: Session, b: Bytes, c: CK_ULONG, d: Bytes, e: Length);
    C_GenerateKey(a: Session, b: Mechanism, c: Template, d: CK_ULONG, e: *mut Object) => generate_key;
    C_GenerateKeyPair(a: Session, b: Mechanism, c: Template, d: CK_ULONG,
        e: Template, f: CK_ULONG, g: *mut Object, h: *mut Object);
    C_WrapKey(a: Session, b: Mechanism, c: Object, d: Object, e: Bytes, f: Length) => wrap_key;
    C_UnwrapKey(a: Session, b: Mechanism, c: Object, d: Bytes, e: CK_ULONG,
        f: Template, g: CK_ULONG, h: *mut Object) => unwrap_key;
    C_DeriveKey(a: Session, b: Mechanism, c: Object, d: Template, e: CK_ULONG, f: *mut Object);
    C_SeedRandom(a: Session, b: Bytes, c: CK_ULONG);
    C_GenerateRandom(a: Session, b: Bytes, c: CK_ULONG);
    C_GetFunctionStatus(a: Session);
    C_CancelFunction(a: Session);
    C_WaitForSlotEvent(a: CK_FLAGS, b: *mut CK_SLOT_ID, c: *mut c_void);
}

/// One call of `function`: what the rules want done before and after it, and what is answered.
fn call(function: &'static str, forward: impl FnOnce(&Faults) -> CK_RV) -> CK_RV {
    let (faults, acts) = lock(&RULES).next(function);
    for act in &acts {
        if let Act::Sleep(time) = act {
            thread::sleep(*time);
        }
    }
    if acts.contains(&Act::Kill) {
        faults.log(function, "kill");
        die();
    }
    let before = acts.iter().find_map(|act| if let Act::Answer(rv) = act { Some(*rv) } else { None });
    let stranger = faults.notices_forks && function != "C_Initialize" && !is_initialised_here();
    let before = before.or(stranger.then_some(CKR_CRYPTOKI_NOT_INITIALIZED));
    let done = before.unwrap_or_else(|| forward(&faults));
    let after = acts.iter().find_map(|act| if let Act::AnswerAfter(rv) = act { Some(*rv) } else { None });
    let answer = before.or(after).unwrap_or(done);
    faults.log(function, &format!("{answer:#x}"));
    if acts.contains(&Act::KillAfter) {
        die();
    }
    answer
}

fn initialize(faults: &Faults, arguments: *mut c_void) -> CK_RV {
    if faults.notices_forks && !is_initialised_here() {
        // what the parent had made
        forward!(C_Finalize(ptr::null_mut()));
    }
    let rv = forward!(C_Initialize(arguments));
    if rv == CKR_OK {
        INITIALISED_IN.store(process::id(), Ordering::Release);
        // a forked child starts with the table of its parent
        *lock(&SESSIONS) = Sessions::default();
    }
    rv
}

/// Whether this process called `C_Initialize`, or none has.
fn is_initialised_here() -> bool {
    [0, process::id()].contains(&INITIALISED_IN.load(Ordering::Acquire))
}

/// The process that called `C_Initialize` last, 0 if none has.
static INITIALISED_IN: AtomicU32 = AtomicU32::new(0);

fn finalize(_: &Faults, reserved: *mut c_void) -> CK_RV {
    let rv = forward!(C_Finalize(reserved));
    if rv == CKR_OK {
        *lock(&SESSIONS) = Sessions::default();
    }
    rv
}

fn token_info(faults: &Faults, slot: CK_SLOT_ID, info: *mut CK_TOKEN_INFO) -> CK_RV {
    let rv = forward!(C_GetTokenInfo(slot, info));
    if rv != CKR_OK {
        return rv;
    }
    let Some(info) = (unsafe { info.as_mut() }) else { return rv };
    info.flags |= faults.pin_flags;
    if faults.clock_garbage {
        info.flags |= CKF_CLOCK_ON_TOKEN;
        info.utcTime = CLOCK_GARBAGE;
    }
    if let Some(limit) = faults.sessions {
        info.ulMaxSessionCount = limit;
        info.ulMaxRwSessionCount = limit;
    }
    rv
}

fn open_session(
    faults: &Faults,
    slot: CK_SLOT_ID,
    flags: CK_FLAGS,
    application: *mut c_void,
    notify: CK_NOTIFY,
    session: *mut Session,
) -> CK_RV {
    // locked over the real call, so that two threads cannot both take the last session
    let mut sessions = lock(&SESSIONS);
    let open = sessions.slots.values().filter(|of| **of == slot).count();
    if faults.sessions.is_some_and(|limit| open as CK_ULONG >= limit) {
        return CKR_SESSION_COUNT;
    }
    let rv = forward!(C_OpenSession(slot, flags, application, notify, session));
    if rv == CKR_OK {
        sessions.slots.insert(unsafe { session.read() }, slot);
    }
    rv
}

fn close_session(_: &Faults, session: Session) -> CK_RV {
    let mut sessions = lock(&SESSIONS);
    let rv = forward!(C_CloseSession(session));
    if rv == CKR_OK {
        sessions.slots.remove(&session);
        sessions.key_wraps.retain(|(of, _), _| *of != session);
    }
    rv
}

fn close_all_sessions(_: &Faults, slot: CK_SLOT_ID) -> CK_RV {
    let mut sessions = lock(&SESSIONS);
    let rv = forward!(C_CloseAllSessions(slot));
    if rv == CKR_OK {
        let Sessions { slots, key_wraps } = &mut *sessions;
        slots.retain(|_, of| *of != slot);
        key_wraps.retain(|(of, _), _| slots.contains_key(of));
    }
    rv
}

fn create_object(faults: &Faults, session: Session, template: Template, count: CK_ULONG, object: *mut Object) -> CK_RV {
    let is_data = |attribute: &CK_ATTRIBUTE| attribute.type_ == CKA_CLASS && ulong(attribute) == Some(CKO_DATA);
    if faults.no_data_objects && attributes(template, count).iter().any(is_data) {
        return CKR_ATTRIBUTE_VALUE_INVALID;
    }
    forward!(C_CreateObject(session, template, count, object))
}

fn attribute_value(faults: &Faults, session: Session, object: Object, template: Template, count: CK_ULONG) -> CK_RV {
    let rv = forward!(C_GetAttributeValue(session, object, template, count));
    if faults.kw_encrypt && is_marked(session, object) {
        for attribute in attributes(template, count).iter().filter(|attribute| is_wrap_permission(attribute)) {
            if is_true(attribute) {
                unsafe { attribute.pValue.cast::<CK_BBOOL>().write(CK_FALSE) };
            }
        }
    }
    rv
}

fn set_attribute_value(
    faults: &Faults,
    session: Session,
    object: Object,
    template: Template,
    count: CK_ULONG,
) -> CK_RV {
    if !faults.kw_encrypt || !is_marked(session, object) {
        return forward!(C_SetAttributeValue(session, object, template, count));
    }
    // the emulation needs both permissions as long as the key lives
    let mut others = attributes(template, count).to_vec();
    others.retain(|attribute| !is_wrap_permission(attribute));
    if others.is_empty() && count > 0 {
        return CKR_OK;
    }
    forward!(C_SetAttributeValue(session, object, others.as_mut_ptr(), others.len() as CK_ULONG))
}

fn encrypt_init(faults: &Faults, session: Session, mechanism: Mechanism, key: Object) -> CK_RV {
    if faults.lacks(mechanism) {
        return CKR_MECHANISM_INVALID;
    }
    if lock(&SESSIONS).key_wraps.contains_key(&(session, Direction::Encrypt)) {
        return CKR_OPERATION_ACTIVE;
    }
    if faults.kw_encrypt && is(mechanism, CKM_AES_KEY_WRAP) {
        return start_key_wrap(session, Direction::Encrypt, mechanism, key);
    }
    if let Some(token_iv) = faults.token_iv
        && is(mechanism, CKM_AES_GCM)
    {
        let rv = make_iv(token_iv, session, mechanism);
        if rv != CKR_OK {
            return rv;
        }
    }
    forward!(C_EncryptInit(session, mechanism, key))
}

fn encrypt(_: &Faults, session: Session, data: Bytes, length: CK_ULONG, out: Bytes, out_length: Length) -> CK_RV {
    let started = lock(&SESSIONS).key_wraps.get(&(session, Direction::Encrypt)).copied();
    match started {
        Some(key) => key_wrap(session, Direction::Encrypt, key, data, length, out, out_length),
        None => forward!(C_Encrypt(session, data, length, out, out_length)),
    }
}

fn decrypt_init(faults: &Faults, session: Session, mechanism: Mechanism, key: Object) -> CK_RV {
    if faults.lacks(mechanism) {
        return CKR_MECHANISM_INVALID;
    }
    if lock(&SESSIONS).key_wraps.contains_key(&(session, Direction::Decrypt)) {
        return CKR_OPERATION_ACTIVE;
    }
    if faults.kw_encrypt && is(mechanism, CKM_AES_KEY_WRAP) {
        return start_key_wrap(session, Direction::Decrypt, mechanism, key);
    }
    forward!(C_DecryptInit(session, mechanism, key))
}

fn decrypt(_: &Faults, session: Session, data: Bytes, length: CK_ULONG, out: Bytes, out_length: Length) -> CK_RV {
    let started = lock(&SESSIONS).key_wraps.get(&(session, Direction::Decrypt)).copied();
    match started {
        Some(key) => key_wrap(session, Direction::Decrypt, key, data, length, out, out_length),
        None => forward!(C_Decrypt(session, data, length, out, out_length)),
    }
}

fn generate_key(
    faults: &Faults,
    session: Session,
    mechanism: Mechanism,
    template: Template,
    count: CK_ULONG,
    key: *mut Object,
) -> CK_RV {
    let asked = attributes(template, count);
    let encrypts = asked.iter().any(|attribute| attribute.type_ == CKA_ENCRYPT && is_true(attribute));
    if !faults.kw_encrypt || !encrypts {
        return forward!(C_GenerateKey(session, mechanism, template, count, key));
    }
    let mut yes = CK_TRUE;
    let mut mark = [attribute(CKA_EXTRACTABLE, ptr::from_mut(&mut yes).cast(), size_of::<CK_BBOOL>())];
    let mut given = asked.to_vec();
    for permission in [CKA_WRAP, CKA_UNWRAP] {
        let attribute = attribute(permission, ptr::from_mut(&mut yes).cast(), size_of::<CK_BBOOL>());
        match given.iter_mut().find(|given| given.type_ == permission) {
            Some(given) => *given = attribute,
            None => given.push(attribute),
        }
    }
    let refused = |attribute: &CK_ATTRIBUTE| is_wrap_permission(attribute) && !is_true(attribute);
    if asked.iter().any(refused) {
        // what is wrapped in the emulation is extractable, so this template forbids nothing
        given.push(attribute(CKA_WRAP_TEMPLATE, mark.as_mut_ptr().cast(), size_of_val(&mark)));
    }
    forward!(C_GenerateKey(session, mechanism, given.as_mut_ptr(), given.len() as CK_ULONG, key))
}

fn wrap_key(
    faults: &Faults,
    session: Session,
    mechanism: Mechanism,
    wrapping_key: Object,
    key: Object,
    out: Bytes,
    out_length: Length,
) -> CK_RV {
    if faults.lacks(mechanism) {
        return CKR_MECHANISM_INVALID;
    }
    if faults.kw_encrypt && is_marked(session, wrapping_key) {
        return CKR_KEY_FUNCTION_NOT_PERMITTED;
    }
    forward!(C_WrapKey(session, mechanism, wrapping_key, key, out, out_length))
}

fn unwrap_key(
    faults: &Faults,
    session: Session,
    mechanism: Mechanism,
    unwrapping_key: Object,
    wrapped: Bytes,
    length: CK_ULONG,
    template: Template,
    count: CK_ULONG,
    key: *mut Object,
) -> CK_RV {
    if faults.lacks(mechanism) {
        return CKR_MECHANISM_INVALID;
    }
    if faults.kw_encrypt && is_marked(session, unwrapping_key) {
        return CKR_KEY_FUNCTION_NOT_PERMITTED;
    }
    forward!(C_UnwrapKey(session, mechanism, unwrapping_key, wrapped, length, template, count, key))
}

/// Writes the IV that the token made into GCM parameters whose IV is all zero.
fn make_iv(token_iv: TokenIv, session: Session, mechanism: Mechanism) -> CK_RV {
    let CK_MECHANISM { pParameter, ulParameterLen, .. } = unsafe { mechanism.read() };
    if pParameter.is_null() || ulParameterLen != size_of::<CK_GCM_PARAMS>() as CK_ULONG {
        return CKR_OK;
    }
    let CK_GCM_PARAMS { pIv, ulIvLen, .. } = unsafe { pParameter.cast::<CK_GCM_PARAMS>().read_unaligned() };
    if pIv.is_null() {
        return CKR_OK;
    }
    let iv = unsafe { slice::from_raw_parts_mut(pIv, usize_of(ulIvLen)) };
    if iv.iter().any(|byte| *byte != 0) {
        return CKR_OK;
    }
    match token_iv {
        TokenIv::Zero => CKR_OK,
        TokenIv::Repeat => {
            iv.fill(REPEATED_IV_BYTE);
            CKR_OK
        }
        TokenIv::Random => forward!(C_GenerateRandom(session, pIv, ulIvLen)),
    }
}

/// `C_EncryptInit` and `C_DecryptInit` of AES Key Wrap.
fn start_key_wrap(session: Session, direction: Direction, mechanism: Mechanism, key: Object) -> CK_RV {
    if !unsafe { (*mechanism).pParameter }.is_null() {
        return CKR_MECHANISM_PARAM_INVALID;
    }
    let permission = match direction {
        Direction::Encrypt => CKA_ENCRYPT,
        Direction::Decrypt => CKA_DECRYPT,
    };
    let mut permitted = CK_FALSE;
    let mut template = attribute(permission, ptr::from_mut(&mut permitted).cast(), size_of::<CK_BBOOL>());
    match forward!(C_GetAttributeValue(session, key, &mut template, 1)) {
        CKR_OK if permitted == CK_TRUE => {
            lock(&SESSIONS).key_wraps.insert((session, direction), key);
            CKR_OK
        }
        CKR_OK => CKR_KEY_FUNCTION_NOT_PERMITTED,
        CKR_OBJECT_HANDLE_INVALID => CKR_KEY_HANDLE_INVALID,
        rv => rv,
    }
}

/// `C_Encrypt` and `C_Decrypt` of AES Key Wrap. The operation ends, unless the caller only asked for the length.
fn key_wrap(
    session: Session,
    direction: Direction,
    key: Object,
    data: Bytes,
    length: CK_ULONG,
    out: Bytes,
    out_length: Length,
) -> CK_RV {
    let needed = match direction {
        Direction::Encrypt => Some(length.saturating_add(8)).filter(|_| length >= 16 && length.is_multiple_of(8)),
        Direction::Decrypt => Some(length.saturating_sub(8)).filter(|_| length >= 24 && length.is_multiple_of(8)),
    };
    if let (Some(needed), Some(room)) = (needed, unsafe { out_length.as_mut() })
        && (out.is_null() || *room < needed)
    {
        *room = needed;
        return if out.is_null() { CKR_OK } else { CKR_BUFFER_TOO_SMALL };
    }
    lock(&SESSIONS).key_wraps.remove(&(session, direction));
    if out_length.is_null() || data.is_null() {
        return CKR_ARGUMENTS_BAD;
    }
    match (direction, needed) {
        (Direction::Encrypt, None) => CKR_DATA_LEN_RANGE,
        (Direction::Decrypt, None) => CKR_ENCRYPTED_DATA_LEN_RANGE,
        (Direction::Encrypt, Some(_)) => wrap_bytes(session, key, data, length, out, out_length),
        (Direction::Decrypt, Some(needed)) => unwrap_bytes(session, key, data, length, out, needed, out_length),
    }
}

fn wrap_bytes(session: Session, key: Object, data: Bytes, length: CK_ULONG, out: Bytes, out_length: Length) -> CK_RV {
    let mut object = CK_INVALID_HANDLE;
    let rv = with_secret_template(|template| {
        let mut template = template.to_vec();
        template.push(attribute(CKA_VALUE, data.cast(), usize_of(length)));
        forward!(C_CreateObject(session, template.as_mut_ptr(), template.len() as CK_ULONG, &mut object))
    });
    if rv != CKR_OK {
        return rv;
    }
    let rv = forward!(C_WrapKey(session, &mut key_wrap_mechanism(), key, object, out, out_length));
    let destroyed = forward!(C_DestroyObject(session, object));
    match rv {
        CKR_OK => destroyed,
        CKR_WRAPPING_KEY_HANDLE_INVALID => CKR_KEY_HANDLE_INVALID,
        rv => rv,
    }
}

fn unwrap_bytes(
    session: Session,
    key: Object,
    wrapped: Bytes,
    length: CK_ULONG,
    out: Bytes,
    needed: CK_ULONG,
    out_length: Length,
) -> CK_RV {
    let mut object = CK_INVALID_HANDLE;
    let rv = with_secret_template(|template| {
        let (start, count) = (template.as_mut_ptr(), template.len() as CK_ULONG);
        forward!(C_UnwrapKey(session, &mut key_wrap_mechanism(), key, wrapped, length, start, count, &mut object))
    });
    match rv {
        CKR_OK => {}
        CKR_UNWRAPPING_KEY_HANDLE_INVALID => return CKR_KEY_HANDLE_INVALID,
        // what tokens say of a wrapping that does not verify; anything else is not about the bytes
        CKR_GENERAL_ERROR | CKR_FUNCTION_FAILED | CKR_WRAPPED_KEY_INVALID | CKR_WRAPPED_KEY_LEN_RANGE => {
            return CKR_ENCRYPTED_DATA_INVALID;
        }
        rv => return rv,
    }
    let mut value = attribute(CKA_VALUE, out.cast(), usize_of(needed));
    let rv = forward!(C_GetAttributeValue(session, object, &mut value, 1));
    let destroyed = forward!(C_DestroyObject(session, object));
    if rv == CKR_OK {
        unsafe { out_length.write(value.ulValueLen) };
        return destroyed;
    }
    rv
}

/// Lends the template of a secret that anyone may read, gone with its session.
fn with_secret_template(body: impl FnOnce(&mut [CK_ATTRIBUTE]) -> CK_RV) -> CK_RV {
    let (mut class, mut key_type) = (CKO_SECRET_KEY, CKK_GENERIC_SECRET);
    let (mut yes, mut no) = (CK_TRUE, CK_FALSE);
    let mut flag = |kind, value: bool| {
        let value = if value { &mut yes } else { &mut no };
        attribute(kind, ptr::from_mut(value).cast(), size_of::<CK_BBOOL>())
    };
    body(&mut [
        attribute(CKA_CLASS, ptr::from_mut(&mut class).cast(), size_of::<CK_OBJECT_CLASS>()),
        attribute(CKA_KEY_TYPE, ptr::from_mut(&mut key_type).cast(), size_of::<CK_KEY_TYPE>()),
        flag(CKA_TOKEN, false),
        flag(CKA_PRIVATE, false),
        flag(CKA_SENSITIVE, false),
        flag(CKA_EXTRACTABLE, true),
    ])
}

fn key_wrap_mechanism() -> CK_MECHANISM {
    CK_MECHANISM { mechanism: CKM_AES_KEY_WRAP, pParameter: ptr::null_mut(), ulParameterLen: 0 }
}

/// Whether this key was generated under `kw-encrypt` with wrapping refused.
fn is_marked(session: Session, object: Object) -> bool {
    let mut template = attribute(CKA_WRAP_TEMPLATE, ptr::null_mut(), 0);
    let rv = forward!(C_GetAttributeValue(session, object, &mut template, 1));
    rv == CKR_OK && template.ulValueLen > 0
}

fn is(mechanism: Mechanism, wanted: CK_MECHANISM_TYPE) -> bool {
    unsafe { mechanism.as_ref() }.is_some_and(|mechanism| mechanism.mechanism == wanted)
}

fn is_wrap_permission(attribute: &CK_ATTRIBUTE) -> bool {
    matches!(attribute.type_, CKA_WRAP | CKA_UNWRAP)
}

fn is_true(attribute: &CK_ATTRIBUTE) -> bool {
    let sized = !attribute.pValue.is_null() && attribute.ulValueLen == size_of::<CK_BBOOL>() as CK_ULONG;
    sized && unsafe { attribute.pValue.cast::<CK_BBOOL>().read() } != CK_FALSE
}

fn ulong(attribute: &CK_ATTRIBUTE) -> Option<CK_ULONG> {
    let sized = !attribute.pValue.is_null() && attribute.ulValueLen == size_of::<CK_ULONG>() as CK_ULONG;
    sized.then(|| unsafe { attribute.pValue.cast::<CK_ULONG>().read_unaligned() })
}

fn attribute(kind: CK_ATTRIBUTE_TYPE, value: *mut c_void, length: usize) -> CK_ATTRIBUTE {
    CK_ATTRIBUTE { type_: kind, pValue: value, ulValueLen: length as CK_ULONG }
}

fn attributes<'a>(template: Template, count: CK_ULONG) -> &'a [CK_ATTRIBUTE] {
    if template.is_null() {
        return &[];
    }
    unsafe { slice::from_raw_parts(template, usize_of(count)) }
}

fn usize_of(length: CK_ULONG) -> usize {
    usize::try_from(length).unwrap_or_else(|_| fail(&"a length beyond all memory"))
}

/// The real module's functions and ours.
struct Module {
    real: CK_FUNCTION_LIST,
    ours: CK_FUNCTION_LIST,
}

fn module() -> &'static Module {
    static MODULE: OnceLock<Module> = OnceLock::new();
    MODULE.get_or_init(|| {
        let path = env::var_os("HARDWRAP_FAULT_MODULE").unwrap_or_else(|| "/usr/lib/softhsm/libsofthsm2.so".into());
        let broken = |why: &dyn Display| -> ! { fail(&format_args!("cannot load {}: {why}", path.display())) };
        let library = unsafe { Pkcs11::new(&path) }.unwrap_or_else(|error| broken(&error));
        let function = *library.C_GetFunctionList.as_ref().unwrap_or_else(|error| broken(error));
        let mut list = ptr::null_mut();
        let rv = unsafe { function(&mut list) };
        if rv != CKR_OK || list.is_null() {
            broken(&format_args!("C_GetFunctionList answers {rv:#x}"));
        }
        let real = unsafe { list.read() };
        // its functions are called as long as the process lives
        mem::forget(library);
        Module { real, ours: function_list(real.version) }
    })
}

/// What the rules file says now, and how often each function was called under it.
struct Rules {
    path: Option<PathBuf>,
    text: String,
    faults: Arc<Faults>,
    calls: HashMap<&'static str, u64>,
    any: u64,
}

impl Rules {
    fn new() -> Self {
        Self {
            path: env::var_os("HARDWRAP_FAULT").map(PathBuf::from),
            text: String::new(),
            faults: Arc::default(),
            calls: HashMap::new(),
            any: 0,
        }
    }

    /// Counts one call of `function`; gives the rules as they are now and what they want of this call.
    fn next(&mut self, function: &'static str) -> (Arc<Faults>, Vec<Act>) {
        self.read_again();
        self.any += 1;
        let any = self.any;
        let calls = self.calls.entry(function).or_default();
        *calls += 1;
        let matches = |rule: &&CallRule| {
            let calls = match rule.function {
                None => any,
                Some(wanted) if wanted == function => *calls,
                Some(_) => return false,
            };
            rule.nth.is_none_or(|nth| nth == calls)
        };
        let acts = self.faults.calls.iter().filter(matches).map(|rule| rule.act).collect();
        (Arc::clone(&self.faults), acts)
    }

    fn read_again(&mut self) {
        let Some(path) = &self.path else { return };
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => fail(&format_args!("cannot read {}: {error}", path.display())),
        };
        if text == self.text {
            return;
        }
        self.faults = Arc::new(Faults::parse(&text));
        self.text = text;
        self.calls.clear();
        self.any = 0;
    }
}

/// The rules, understood.
#[derive(Default)]
struct Faults {
    calls: Vec<CallRule>,
    token_iv: Option<TokenIv>,
    sessions: Option<CK_ULONG>,
    clock_garbage: bool,
    pin_flags: CK_FLAGS,
    no_data_objects: bool,
    notices_forks: bool,
    no_kw: bool,
    no_gcm: bool,
    kw_encrypt: bool,
    logs: Vec<PathBuf>,
}

impl Faults {
    fn parse(text: &str) -> Self {
        let mut faults = Self::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().take_while(|word| !word.starts_with('#')).collect();
            if faults.add(&words).is_none() {
                fail(&format_args!("cannot understand the rule {line:?}"));
            }
        }
        faults
    }

    fn add(&mut self, words: &[&str]) -> Option<()> {
        match *words {
            [] => {}
            ["log", path] => self.logs.push(Path::new(path).to_owned()),
            ["token-iv", kind] => {
                let token_iv = match kind {
                    "random" => TokenIv::Random,
                    "zero" => TokenIv::Zero,
                    "repeat" => TokenIv::Repeat,
                    _ => return None,
                };
                only_once(self.token_iv.replace(token_iv))?;
            }
            // a limit of 0 in token info would mean that there is none
            ["sessions", limit] => {
                only_once(self.sessions.replace(limit.parse().ok().filter(|limit| *limit > 0)?))?;
            }
            ["pin-flags", flag] => {
                self.pin_flags |= match flag {
                    "low" => CKF_USER_PIN_COUNT_LOW,
                    "final" => CKF_USER_PIN_FINAL_TRY,
                    "locked" => CKF_USER_PIN_LOCKED,
                    _ => return None,
                }
            }
            ["token-info-clock-garbage"] => self.clock_garbage = true,
            ["no-data-objects"] => self.no_data_objects = true,
            ["notices-forks"] => self.notices_forks = true,
            ["no-kw"] => self.no_kw = true,
            ["no-gcm"] => self.no_gcm = true,
            ["kw-encrypt"] => self.kw_encrypt = true,
            [function, when, ref act @ ..] => self.calls.push(CallRule::parse(function, when, act)?),
            _ => return None,
        }
        Some(())
    }

    /// Whether the token is to lack this mechanism.
    fn lacks(&self, mechanism: Mechanism) -> bool {
        (self.no_kw && is(mechanism, CKM_AES_KEY_WRAP)) || (self.no_gcm && is(mechanism, CKM_AES_GCM))
    }

    fn log(&self, function: &str, outcome: &str) {
        for path in &self.logs {
            // one write, so that lines of several threads and processes do not mix
            let line = format!("{function} {outcome}\n");
            let written = OpenOptions::new().append(true).create(true).open(path);
            if let Err(error) = written.and_then(|mut file| file.write_all(line.as_bytes())) {
                fail(&format_args!("cannot write {}: {error}", path.display()));
            }
        }
    }
}

fn only_once<T>(before: Option<T>) -> Option<()> {
    before.is_none().then_some(())
}

/// A rule about calls: of one function or any, the nth or every one.
struct CallRule {
    function: Option<&'static str>,
    nth: Option<u64>,
    act: Act,
}

impl CallRule {
    fn parse(function: &str, when: &str, act: &[&str]) -> Option<Self> {
        let function = match function {
            "any" => None,
            name => Some(*NAMES.iter().find(|known| **known == name)?),
        };
        let nth = match when {
            "*" => None,
            number => Some(number.parse().ok().filter(|nth| *nth > 0)?),
        };
        let answer = |text: &str| CK_RV::from_str_radix(text.strip_prefix("0x")?, 16).ok();
        let act = match *act {
            ["kill"] => Act::Kill,
            ["kill-after"] => Act::KillAfter,
            ["sleep", milliseconds] => Act::Sleep(Duration::from_millis(milliseconds.parse().ok()?)),
            [rv] => Act::Answer(answer(rv)?),
            [rv, "after"] => Act::AnswerAfter(answer(rv)?),
            _ => return None,
        };
        Some(Self { function, nth, act })
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Act {
    Answer(CK_RV),
    AnswerAfter(CK_RV),
    Kill,
    KillAfter,
    Sleep(Duration),
}

#[derive(Clone, Copy)]
enum TokenIv {
    Random,
    Zero,
    Repeat,
}

/// Open sessions with their slots, and the key wraps that were started in them.
#[derive(Default)]
struct Sessions {
    slots: HashMap<Session, CK_SLOT_ID>,
    key_wraps: HashMap<(Session, Direction), Object>,
}

#[derive(Clone, Copy, Eq, Hash, PartialEq)]
enum Direction {
    Encrypt,
    Decrypt,
}

/// A panic elsewhere has already aborted the process, so poison says nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fail(why: &dyn Display) -> ! {
    let _ = writeln!(io::stderr(), "hardwrap_fault: {why}");
    process::abort()
}

fn die() -> ! {
    unsafe extern "C" {
        safe fn getpid() -> i32;
        safe fn kill(pid: i32, signal: i32) -> i32;
    }
    kill(getpid(), SIGKILL);
    loop {
        thread::park();
    }
}

static RULES: LazyLock<Mutex<Rules>> = LazyLock::new(|| Mutex::new(Rules::new()));
static SESSIONS: LazyLock<Mutex<Sessions>> = LazyLock::new(Mutex::default);

const CLOCK_GARBAGE: [CK_CHAR; 16] = *b"\xff\x00no time:\x7f\xfe\x01 ?!";
const REPEATED_IV_BYTE: CK_BYTE = 0x5a;
const SIGKILL: i32 = 9;
