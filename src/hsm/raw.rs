//! The hot path and what cryptoki cannot say: single PKCS#11 calls into fixed buffers, through cryptoki-sys, on the
//! module and sessions that cryptoki keeps. All `unsafe` of the token layer but one line stands here.
#![expect(unsafe_code, reason = "PKCS#11 is a C interface: every call takes pointers")]

use std::path::Path;
use std::sync::Arc;

use cryptoki::context::Function;
use cryptoki::error::{Error as CryptokiError, Rv};
use cryptoki::object::ObjectHandle;
use cryptoki::session::Session;
use cryptoki::slot::Slot;
use cryptoki_sys::{
    CK_ATTRIBUTE, CK_ATTRIBUTE_TYPE, CK_BBOOL, CK_FALSE, CK_FUNCTION_LIST, CK_GCM_PARAMS, CK_KEY_TYPE, CK_MECHANISM,
    CK_MECHANISM_TYPE, CK_OBJECT_CLASS, CK_OBJECT_HANDLE, CK_RV, CK_TOKEN_INFO, CK_TRUE, CK_ULONG, CKA_CLASS,
    CKA_EXTRACTABLE, CKA_KEY_TYPE, CKA_PRIVATE, CKA_SENSITIVE, CKA_TOKEN, CKA_VALUE, CKA_VALUE_LEN, CKK_GENERIC_SECRET,
    CKM_AES_GCM, CKM_AES_KEY_WRAP, CKO_SECRET_KEY, Pkcs11,
};

use zeroize::Zeroizing;

use super::Error;
use super::counted::count;
use crate::provider::Aad;

/// A module's PKCS#11 2.40 function list, and the library that keeps it valid.
#[derive(Clone)]
pub(super) struct Functions {
    _library: Arc<Pkcs11>,
    list: CK_FUNCTION_LIST,
}

/// How `C_Encrypt` and `C_Decrypt` are to work.
pub(super) enum Cipher<'a> {
    /// `CKM_AES_KEY_WRAP` (RFC 3394), no parameter.
    KeyWrap,
    /// `CKM_AES_GCM`, 12-byte IV, 128-bit tag. The token may write its own IV into the buffer.
    Gcm(&'a mut [u8; 12], &'a Aad),
}

impl Functions {
    pub(super) fn load(path: &Path) -> Result<Self, CryptokiError> {
        // SAFETY: loading runs the library's own initialisers, as cryptoki's loading of the same file just did.
        let library = unsafe { Pkcs11::new(path) }.map_err(CryptokiError::LibraryLoading)?;
        let get = library.C_GetFunctionList.as_ref().map_err(|_| CryptokiError::MissingSymbol("C_GetFunctionList"))?;
        let mut list = std::ptr::null_mut();
        // SAFETY: the module writes a pointer to its own static list.
        done(unsafe { get(&raw mut list) }, Function::GetFunctionList)?;
        if list.is_null() {
            return Err(CryptokiError::NullFunctionPointer);
        }
        // SAFETY: not null, and static in the library, which this struct keeps.
        let list = unsafe { *list };
        Ok(Self { _library: Arc::new(library), list })
    }

    /// `C_GetTokenInfo`, unread: cryptoki 0.12 fails on a clock field that is no date (openCryptoki).
    pub(super) fn token_info(&self, slot: Slot) -> Result<CK_TOKEN_INFO, Error> {
        let mut info = CK_TOKEN_INFO::default();
        let call = self.list.C_GetTokenInfo.ok_or(CryptokiError::NullFunctionPointer)?;
        // SAFETY: the buffer has the struct's size.
        done(unsafe { call(slot.into(), &raw mut info) }, Function::GetTokenInfo)?;
        Ok(info)
    }

    /// `C_EncryptInit` and one `C_Encrypt` into a buffer of just the right size.
    pub(super) fn encrypt<const N: usize>(
        &self,
        session: &Session,
        key: ObjectHandle,
        cipher: Cipher<'_>,
        input: &[u8],
    ) -> Result<[u8; N], Error> {
        let init = self.list.C_EncryptInit.ok_or(CryptokiError::NullFunctionPointer)?;
        let encrypt = self.list.C_Encrypt.ok_or(CryptokiError::NullFunctionPointer)?;
        let mut output = [0; N];
        let mut length = ulong(N)?;
        with_mechanism(cipher, |mechanism| {
            // SAFETY: mechanism, parameters, input and output live until C_Encrypt returns; lengths are theirs.
            unsafe {
                done(init(session.handle(), mechanism, key.handle()), Function::EncryptInit)?;
                let input_length = ulong(input.len())?;
                let input = input.as_ptr().cast_mut();
                done(
                    encrypt(session.handle(), input, input_length, output.as_mut_ptr(), &raw mut length),
                    Function::Encrypt,
                )?;
            }
            Ok(())
        })?;
        exactly::<N>(length, "C_Encrypt gave another length")?;
        Ok(output)
    }

    /// `C_DecryptInit` and one `C_Decrypt` into `output`, which must be filled to the end.
    pub(super) fn decrypt<const N: usize>(
        &self,
        session: &Session,
        key: ObjectHandle,
        cipher: Cipher<'_>,
        input: &[u8],
        output: &mut [u8; N],
    ) -> Result<(), Error> {
        let init = self.list.C_DecryptInit.ok_or(CryptokiError::NullFunctionPointer)?;
        let decrypt = self.list.C_Decrypt.ok_or(CryptokiError::NullFunctionPointer)?;
        // SoftHSM2 asks for as much room as the input has, and writes less.
        let mut buffer = Zeroizing::new([0; LONGEST_WRAPPED]);
        let room = buffer.get_mut(..input.len()).ok_or(Error::Answer("the input is longer than any wrapped DEK"))?;
        let mut length = ulong(room.len())?;
        with_mechanism(cipher, |mechanism| {
            // SAFETY: mechanism, parameters, input and output live until C_Decrypt returns; lengths are theirs.
            unsafe {
                done(init(session.handle(), mechanism, key.handle()), Function::DecryptInit)?;
                let input_length = ulong(input.len())?;
                let input = input.as_ptr().cast_mut();
                done(
                    decrypt(session.handle(), input, input_length, room.as_mut_ptr(), &raw mut length),
                    Function::Decrypt,
                )?;
            }
            Ok(())
        })?;
        exactly::<N>(length, "C_Decrypt gave another length")?;
        output.copy_from_slice(&buffer[..N]);
        Ok(())
    }

    /// Makes a generic secret of `value` that lives in this session only: not private, readable, extractable.
    pub(super) fn create_secret(&self, session: &Session, value: &[u8; 64]) -> Result<CK_OBJECT_HANDLE, Error> {
        let call = self.list.C_CreateObject.ok_or(CryptokiError::NullFunctionPointer)?;
        let mut object = 0;
        let base = secret_template();
        let mut template = [attribute(CKA_VALUE, value); 7];
        template[..base.len()].copy_from_slice(&base);
        // SAFETY: every pointer of the template is to a static or to `value`, which outlives the call.
        done(
            unsafe { call(session.handle(), template.as_mut_ptr(), ulong(template.len())?, &raw mut object) },
            Function::CreateObject,
        )?;
        Ok(object)
    }

    /// `C_WrapKey` with `CKM_AES_KEY_WRAP` into a buffer of just the right size.
    pub(super) fn wrap_key<const N: usize>(
        &self,
        session: &Session,
        key: ObjectHandle,
        object: CK_OBJECT_HANDLE,
    ) -> Result<[u8; N], Error> {
        let call = self.list.C_WrapKey.ok_or(CryptokiError::NullFunctionPointer)?;
        let mut output = [0; N];
        let mut length = ulong(N)?;
        with_mechanism(Cipher::KeyWrap, |mechanism| {
            // SAFETY: mechanism and output live until the call returns; the length is the output's.
            let answer = unsafe {
                call(session.handle(), mechanism, key.handle(), object, output.as_mut_ptr(), &raw mut length)
            };
            Ok(done(answer, Function::WrapKey)?)
        })?;
        exactly::<N>(length, "C_WrapKey gave another length")?;
        Ok(output)
    }

    /// `C_UnwrapKey` with `CKM_AES_KEY_WRAP` to a generic secret as [`Functions::create_secret`] makes it.
    /// `CKA_VALUE_LEN` is sent only where `with_length`: Luna and MyEID want it, SoftHSM2 and Utimaco refuse it.
    pub(super) fn unwrap_key(
        &self,
        session: &Session,
        key: ObjectHandle,
        wrapped: &[u8],
        with_length: bool,
    ) -> Result<CK_OBJECT_HANDLE, Error> {
        let call = self.list.C_UnwrapKey.ok_or(CryptokiError::NullFunctionPointer)?;
        let mut object = 0;
        let base = secret_template();
        let mut template = [attribute(CKA_VALUE_LEN, &SECRET_LENGTH); 7];
        template[..base.len()].copy_from_slice(&base);
        let count = if with_length { template.len() } else { base.len() };
        with_mechanism(Cipher::KeyWrap, |mechanism| {
            // SAFETY: mechanism, wrapped bytes and template live until the call returns; lengths are theirs.
            let answer = unsafe {
                call(
                    session.handle(),
                    mechanism,
                    key.handle(),
                    wrapped.as_ptr().cast_mut(),
                    ulong(wrapped.len())?,
                    template.as_mut_ptr(),
                    ulong(count)?,
                    &raw mut object,
                )
            };
            Ok(done(answer, Function::UnwrapKey)?)
        })?;
        Ok(object)
    }

    /// Reads a secret's `CKA_VALUE` into `output`, which it must fill to the end.
    pub(super) fn read_value(
        &self,
        session: &Session,
        object: CK_OBJECT_HANDLE,
        output: &mut [u8; 64],
    ) -> Result<(), Error> {
        let call = self.list.C_GetAttributeValue.ok_or(CryptokiError::NullFunctionPointer)?;
        let mut attribute =
            CK_ATTRIBUTE { type_: CKA_VALUE, pValue: output.as_mut_ptr().cast(), ulValueLen: ulong(output.len())? };
        // SAFETY: the attribute points to `output` and gives its length.
        done(unsafe { call(session.handle(), object, &raw mut attribute, 1) }, Function::GetAttributeValue)?;
        exactly::<64>(attribute.ulValueLen, "CKA_VALUE has another length")
    }

    /// Tries to read `CKA_VALUE` of a key of up to 64 bytes; whatever the token gives is wiped.
    pub(super) fn try_value(&self, session: &Session, object: ObjectHandle) -> Result<(), Error> {
        let mut value = Zeroizing::new([0; 64]);
        let call = self.list.C_GetAttributeValue.ok_or(CryptokiError::NullFunctionPointer)?;
        let room = ulong(value.len())?;
        let mut attribute = CK_ATTRIBUTE { type_: CKA_VALUE, pValue: value.as_mut_ptr().cast(), ulValueLen: room };
        // SAFETY: the attribute points to `value` and gives its length.
        Ok(done(
            unsafe { call(session.handle(), object.handle(), &raw mut attribute, 1) },
            Function::GetAttributeValue,
        )?)
    }

    /// `C_DestroyObject`.
    pub(super) fn destroy(&self, session: &Session, object: CK_OBJECT_HANDLE) -> Result<(), Error> {
        let call = self.list.C_DestroyObject.ok_or(CryptokiError::NullFunctionPointer)?;
        // SAFETY: plain values.
        Ok(done(unsafe { call(session.handle(), object) }, Function::DestroyObject)?)
    }
}

/// Runs `work` while SIGHUP, SIGINT and SIGTERM wait: SoftHSM2 rewrites the file of a token at every login, and a
/// process that dies in the middle leaves a token that is none. Nothing helps against SIGKILL.
pub(super) fn without_signals<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: the sets are initialised before they are used, and belong to this thread only; restoring the old mask
    // delivers what waited.
    unsafe {
        let mut waiting: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut waiting);
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
            libc::sigaddset(&raw mut waiting, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const waiting, &raw mut before);
        let done = work();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        done
    }
}

/// Builds the mechanism and its parameters on the stack and lends them out.
fn with_mechanism<T>(cipher: Cipher<'_>, work: impl FnOnce(*mut CK_MECHANISM) -> Result<T, Error>) -> Result<T, Error> {
    let mut parameters = CK_GCM_PARAMS::default();
    let mut mechanism =
        CK_MECHANISM { mechanism: CKM_AES_KEY_WRAP, pParameter: std::ptr::null_mut(), ulParameterLen: 0 };
    if let Cipher::Gcm(iv, aad) = cipher {
        parameters.pIv = iv.as_mut_ptr();
        parameters.ulIvLen = ulong(iv.len())?;
        // NSS refuses 0 here; others do not look.
        parameters.ulIvBits = ulong(iv.len() * 8)?;
        parameters.pAAD = aad.as_bytes().as_ptr().cast_mut();
        parameters.ulAADLen = ulong(aad.as_bytes().len())?;
        parameters.ulTagBits = 128;
        mechanism.mechanism = CKM_AES_GCM as CK_MECHANISM_TYPE;
        mechanism.pParameter = (&raw mut parameters).cast();
        mechanism.ulParameterLen = ulong(size_of::<CK_GCM_PARAMS>())?;
    }
    work(&raw mut mechanism)
}

/// What every secret of route 3 is, its value left out.
fn secret_template() -> [CK_ATTRIBUTE; 6] {
    [
        attribute(CKA_CLASS, &SECRET_KEY),
        attribute(CKA_KEY_TYPE, &GENERIC_SECRET),
        attribute(CKA_TOKEN, &NO),
        attribute(CKA_PRIVATE, &NO),
        attribute(CKA_SENSITIVE, &NO),
        attribute(CKA_EXTRACTABLE, &YES),
    ]
}

/// An attribute that points to `value`; modules read what templates point to, and never write it.
fn attribute<T>(type_: CK_ATTRIBUTE_TYPE, value: &T) -> CK_ATTRIBUTE {
    CK_ATTRIBUTE {
        type_,
        pValue: std::ptr::from_ref(value).cast_mut().cast(),
        ulValueLen: CK_ULONG::try_from(size_of::<T>()).expect("an attribute is a few bytes long"),
    }
}

fn done(answer: CK_RV, function: Function) -> Result<(), CryptokiError> {
    let outcome = match Rv::from(answer) {
        Rv::Ok => Ok(()),
        Rv::Error(ckr) => Err(CryptokiError::Pkcs11(ckr, function)),
    };
    count(function, &outcome);
    outcome
}

fn exactly<const N: usize>(length: CK_ULONG, wrong: &'static str) -> Result<(), Error> {
    if usize::try_from(length) == Ok(N) { Ok(()) } else { Err(Error::Answer(wrong)) }
}

fn ulong(length: usize) -> Result<CK_ULONG, Error> {
    CK_ULONG::try_from(length).map_err(|_| Error::Answer("a length does not fit CK_ULONG"))
}

/// A256KW gives 72 bytes, A256GCMKW 48.
const LONGEST_WRAPPED: usize = 72;
static SECRET_KEY: CK_OBJECT_CLASS = CKO_SECRET_KEY;
static GENERIC_SECRET: CK_KEY_TYPE = CKK_GENERIC_SECRET;
static SECRET_LENGTH: CK_ULONG = 64;
static YES: CK_BBOOL = CK_TRUE;
static NO: CK_BBOOL = CK_FALSE;
