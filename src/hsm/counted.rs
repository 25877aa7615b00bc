//! Calls to the token, counted for whichever recorder of the package `metrics` the application installs.

use cryptoki::context::Function;
use cryptoki::error::Error as CryptokiError;

use super::Ckr;

/// Counts the outcome of a call that cryptoki made.
pub(super) trait Counted {
    /// `function` is the call's name; a failure says itself which of several it was.
    fn counted(self, function: &'static str) -> Self;
}

impl<T> Counted for Result<T, CryptokiError> {
    fn counted(self, function: &'static str) -> Self {
        match &self {
            Ok(_) => metrics::counter!(CALLS, "function" => function, "ckr" => "CKR_OK").increment(1),
            Err(error) => failed(error),
        }
        self
    }
}

/// Counts the outcome of a call of the hot path: what succeeds costs no allocation.
pub(super) fn count(function: Function, outcome: &Result<(), CryptokiError>) {
    match (outcome, function) {
        (Err(error), _) => failed(error),
        (Ok(()), Function::EncryptInit) => ok!("C_EncryptInit"),
        (Ok(()), Function::Encrypt) => ok!("C_Encrypt"),
        (Ok(()), Function::DecryptInit) => ok!("C_DecryptInit"),
        (Ok(()), Function::Decrypt) => ok!("C_Decrypt"),
        (Ok(()), Function::CreateObject) => ok!("C_CreateObject"),
        (Ok(()), Function::DestroyObject) => ok!("C_DestroyObject"),
        (Ok(()), Function::WrapKey) => ok!("C_WrapKey"),
        (Ok(()), Function::UnwrapKey) => ok!("C_UnwrapKey"),
        (Ok(()), Function::GetAttributeValue) => ok!("C_GetAttributeValue"),
        (Ok(()), other) => {
            metrics::counter!(CALLS, "function" => format!("C_{other:?}"), "ckr" => "CKR_OK").increment(1);
        }
    }
}

fn failed(error: &CryptokiError) {
    if let CryptokiError::Pkcs11(ckr, function) = error {
        let (function, ckr) = (format!("C_{function:?}"), Ckr(*ckr).to_string());
        metrics::counter!(CALLS, "function" => function, "ckr" => ckr).increment(1);
    }
}

/// One key that is made at compile time.
macro_rules! ok {
    ($function:literal) => {
        metrics::counter!("hardwrap_token_calls_total", "function" => $function, "ckr" => "CKR_OK").increment(1)
    };
}
use ok;

const CALLS: &str = "hardwrap_token_calls_total";
