use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::*;
use crate::column::{Capacity, Column, Row};
use crate::memory_keys::MemoryKeys;
use crate::provider::Alg;

/// One case of `tests/vectors/hw1.json`, made by an independent implementation in Python.
#[derive(Deserialize)]
struct Case {
    name: String,
    kek_hex: String,
    kid: String,
    identifier: String,
    row: Option<String>,
    context_hex: Option<String>,
    dek_hex: Option<String>,
    iv_hex: Option<String>,
    dek_iv_hex: Option<String>,
    value_b64: Option<String>,
    envelope: String,
    expect: String,
}

impl Case {
    fn column(&self) -> Column {
        let column = Column::new("t", "c", "id", self.identifier.clone()).expect("well named");
        match self.row {
            Some(_) => column.bound_to("id").expect("well named"),
            None => column,
        }
    }

    fn row(&self) -> Option<Row> {
        self.row.as_deref().map(|row| row.try_into().expect("a row"))
    }

    fn keys(&self) -> MemoryKeys {
        let alg = if self.name.starts_with("a256gcmkw") { Alg::A256GcmKw } else { Alg::A256Kw };
        let keys = MemoryKeys::one(self.kid.parse().expect("a key id"), alg, array(&self.kek_hex));
        match &self.dek_iv_hex {
            Some(iv) => keys.with_dek_iv(array(iv)),
            None => keys,
        }
    }
}

fn array<const N: usize>(hex: &str) -> [u8; N] {
    hex::decode(hex).expect("hex").try_into().expect("the length the field has")
}

fn cases() -> Vec<Case> {
    let cases: Vec<Case> = serde_json::from_str(include_str!("../../tests/vectors/hw1.json")).expect("vectors");
    assert_eq!(cases.len(), 105);
    cases
}

#[test]
fn every_vector_opens_or_is_refused_as_stated() {
    for case in cases() {
        let (column, row) = (case.column(), case.row());
        let place = column.at(row.as_ref()).expect("a place");
        match Codec::new(Arc::new(case.keys())).open(&place, &case.envelope) {
            Ok(value) => {
                assert_eq!(case.expect, "open", "{}", case.name);
                let expected = STANDARD.decode(case.value_b64.as_ref().expect("a value")).expect("base64");
                assert_eq!(value.expose(), expected, "{}", case.name);
            }
            Err(error) => assert_eq!(error.kind(), case.expect, "{}: {error}", case.name),
        }
    }
}

#[test]
fn sealing_with_the_drawn_bytes_of_a_vector_gives_its_envelope() {
    let mut sealed = 0;
    for case in cases().iter().filter(|case| case.expect == "open" && case.name != "a256kw-with-also") {
        let (column, row) = (case.column(), case.row());
        let place = column.at(row.as_ref()).expect("a place");
        assert_eq!(
            hex::encode(place.context().as_bytes()),
            case.context_hex.clone().expect("a context"),
            "{}",
            case.name
        );
        let dek = Dek::init::<Error>(|dek| {
            *dek = array(case.dek_hex.as_ref().expect("a DEK"));
            Ok(())
        })
        .expect("filled");
        let value = STANDARD.decode(case.value_b64.as_ref().expect("a value")).expect("base64");
        let keys = case.keys();
        let key = keys.current().expect("a key");
        let wrapped = keys.wrap(key.id, &dek, &place.context().aad()).expect("wrapped");
        let iv = array(case.iv_hex.as_ref().expect("an IV"));
        let text = seal_with(&place, &value, &dek, iv, wrapped).expect("sealed");
        assert_eq!(text, case.envelope, "{}", case.name);
        assert_eq!(text.len() as u64, envelope::sealed_length(key.alg, value.len()), "{}", case.name);
        sealed += 1;
    }
    assert_eq!(sealed, 60);
}

#[test]
fn an_also_entry_survives_the_way_through_the_front() {
    let case = cases().into_iter().find(|case| case.name == "a256kw-with-also").expect("the case");
    let envelope = Envelope::parse(&case.envelope).expect("well formed");
    assert_eq!(envelope.front.also.len(), 1);
    assert_eq!(envelope::write(&envelope.front, &envelope.payload().expect("a payload")), case.envelope);
}

fn column() -> Column {
    Column::new("customer", "iban", "id", "shop:customer:iban").expect("well named").bound_to("id").expect("well named")
}

fn codec(alg: Alg) -> Codec {
    Codec::new(Arc::new(MemoryKeys::one([0, 1, 2, 3, 4, 5, 6, 7].into(), alg, [9; 32])))
}

#[test]
fn the_same_value_sealed_twice_shares_no_part() {
    let (column, row) = (column(), Row::from(7));
    let place = column.at(Some(&row)).expect("a place");
    for alg in [Alg::A256Kw, Alg::A256GcmKw] {
        let [one, two] = [(); 2].map(|()| codec(alg).seal(&place, b"DE02120300000000202051").expect("sealed"));
        let (one, two) = (Envelope::parse(&one).expect("ours"), Envelope::parse(&two).expect("ours"));
        assert_ne!(one.front.wrapped.bytes, two.front.wrapped.bytes);
        assert_ne!(one.front.iv, two.front.iv);
        assert_ne!(one.front.sum, two.front.sum);
        assert_ne!(one.payload().expect("a payload"), two.payload().expect("a payload"));
    }
}

#[test]
fn no_altered_byte_and_no_cut_prefix_opens() {
    let (column, row) = (column(), Row::from(7));
    let place = column.at(Some(&row)).expect("a place");
    for alg in [Alg::A256Kw, Alg::A256GcmKw] {
        let codec = codec(alg);
        let sealed = codec.seal(&place, b"DE02120300000000202051").expect("sealed");
        for end in 1..sealed.len() {
            codec.open(&place, &sealed[..end]).expect_err("a cut envelope");
        }
        assert!(codec.open(&place, &sealed[..0]).expect("the empty prefix stays empty").expose().is_empty());
        for index in 0..sealed.len() {
            for flip in [0x01, 0x02, 0x20] {
                let mut bytes = sealed.clone().into_bytes();
                bytes[index] ^= flip;
                let altered = String::from_utf8(bytes).expect("ASCII stays ASCII");
                codec.open(&place, &altered).expect_err("an altered envelope");
            }
        }
    }
}

#[test]
fn no_arbitrary_text_opens_or_panics() {
    use proptest::prelude::*;
    let (column, row) = (column(), Row::from(7));
    let codec = codec(Alg::A256Kw);
    let sealed = codec.seal(&column.at(Some(&row)).expect("a place"), b"x").expect("sealed");
    proptest!(|(text in r"(hw[0-9]{1,3}:|hw1:[0-9a-f]{16}:|)[ -~]{0,80}(\.[ -~]{0,40})?", cut in 0usize..334, tail in "\\PC{0,20}")| {
        let place = column.at(Some(&row)).expect("a place");
        if !text.is_empty() {
            prop_assert!(codec.open(&place, &text).is_err());
        }
        let spliced = format!("{}{tail}", &sealed[..cut]);
        if !spliced.is_empty() && spliced != sealed {
            prop_assert!(codec.open(&place, &spliced).is_err());
        }
    });
}

#[test]
fn a_value_of_any_bytes_comes_back_and_an_empty_one_stays_empty() {
    let (column, row) = (column(), Row::from(7));
    let place = column.at(Some(&row)).expect("a place");
    let every_byte: Vec<u8> = (0..=255).collect();
    for alg in [Alg::A256Kw, Alg::A256GcmKw] {
        let codec = codec(alg);
        for value in [b"".as_slice(), b"x", b"hw1:0001020304050607:e30=.AAAA", &every_byte, &vec![0x5a; 12 << 20]] {
            let sealed = codec.seal(&place, value).expect("sealed");
            assert_eq!(sealed.is_empty(), value.is_empty());
            assert_eq!(codec.open(&place, &sealed).expect("opened").expose(), value);
        }
    }
}

#[test]
fn cleartext_is_returned_where_the_window_is_open_and_refused_elsewhere() {
    let (closed, row) = (column(), Row::from(7));
    let open = column().cleartext(Cleartext::Accept);
    let codec = codec(Alg::A256Kw);
    let opened = codec.open(&open.at(Some(&row)).expect("a place"), "{\"a\":1}").expect("an open window");
    assert_eq!(opened.expose(), b"{\"a\":1}");
    let closed = closed.at(Some(&row)).expect("a place");
    assert_eq!(codec.open(&closed, "{\"a\":1}").map_err(|e| e.kind()).err(), Some("Cleartext"));
    for foreign in ["nrv1:e30=", "v2:e30="] {
        assert_eq!(codec.open(&closed, foreign).map_err(|e| e.kind()).err(), Some("Foreign"));
    }
}

#[test]
fn what_would_not_fit_is_refused_before_the_key_is_asked() {
    let row = Row::from(7);
    let keys = Arc::new(MemoryKeys::one([0, 1, 2, 3, 4, 5, 6, 7].into(), Alg::A256Kw, [9; 32]));
    let codec = Codec::new(keys);
    for (limit, fits) in [(333, false), (334, true)] {
        let column = column().holding(Capacity(Some(limit)));
        let sealed = codec.seal(&column.at(Some(&row)).expect("a place"), b"x");
        assert_eq!(sealed.as_ref().map(|text| text.len() as u64 <= limit).unwrap_or(false), fits, "{limit}");
        if !fits {
            assert_eq!(sealed.map_err(|e| e.kind()).err(), Some("TooLarge"));
        }
    }
}

#[test]
fn keys_out_of_reach_are_unavailable_and_nothing_is_said_of_the_value() {
    let (column, row) = (column(), Row::from(7));
    let place = column.at(Some(&row)).expect("a place");
    let keys = Arc::new(MemoryKeys::one([0, 1, 2, 3, 4, 5, 6, 7].into(), Alg::A256Kw, [9; 32]));
    let codec = Codec::new(keys.clone());
    let sealed = codec.seal(&place, b"x").expect("sealed");
    keys.set_unavailable(true);
    assert_eq!(codec.open(&place, &sealed).map_err(|e| e.kind()).err(), Some("Unavailable"));
    assert_eq!(codec.seal(&place, b"x").map_err(|e| e.kind()).err(), Some("Unavailable"));
    keys.set_unavailable(false);
    assert_eq!(codec.open(&place, &sealed).expect("back").expose(), b"x");
}

#[test]
fn a_rewrap_changes_what_stands_before_the_first_dot_and_nothing_else() {
    let (old, new) = (KeyId::new(1, [1; 6]), KeyId::new(2, [2; 6]));
    let column = Column::new("t", "c", "id", "t:c").and_then(|c| c.bound_to("id")).expect("well named");
    let (row, other) = (Row::from(7), Row::from(8));
    let place = column.at(Some(&row)).expect("bound");
    for (before, after) in [(Alg::A256Kw, Alg::A256GcmKw), (Alg::A256GcmKw, Alg::A256Kw), (Alg::A256Kw, Alg::A256Kw)] {
        let sealed =
            Codec::new(Arc::new(MemoryKeys::one(old, before, [1; 32]))).seal(&place, b"value").expect("sealed");
        let codec = Codec::new(Arc::new(MemoryKeys::one(old, before, [1; 32]).then(new, after, [2; 32])));
        let rewrapped = codec.rewrap(&place, &sealed).expect("rewrapped").expect("it was under the old key");
        let (fronts, payloads): (Vec<_>, Vec<_>) =
            [&sealed, &rewrapped].iter().map(|text| text.split_once('.').expect("a dot")).unzip();
        assert_eq!(payloads[0], payloads[1]);
        let [was, is] = [fronts[0], fronts[1]].map(|front| front.parse::<Front>().expect("a front"));
        assert_eq!((is.wrapped.key, is.wrapped.alg()), (new, after));
        assert_eq!((was.iv, was.sum), (is.iv, is.sum));
        assert_eq!(codec.open(&place, &rewrapped).expect("opens").expose(), b"value");
        // Nothing is left to do.
        assert_eq!(codec.rewrap(&place, &rewrapped).expect("looked at"), None);
        // What belongs elsewhere is not made to belong here.
        let elsewhere = column.at(Some(&other)).expect("bound");
        assert!(matches!(codec.rewrap(&elsewhere, &sealed), Err(Error::Rejected)));
    }
}

#[test]
fn a_rewrap_keeps_further_keys_and_refuses_what_it_does_not_know() {
    let (old, new, further) = (KeyId::new(1, [1; 6]), KeyId::new(2, [2; 6]), KeyId::new(9, [9; 6]));
    let column = Column::new("t", "c", "id", "t:c").expect("well named");
    let place = column.at(None).expect("unbound");
    let codec = Codec::new(Arc::new(MemoryKeys::one(old, Alg::A256Kw, [1; 32]).then(new, Alg::A256Kw, [2; 32])));
    let sealed = Codec::new(Arc::new(MemoryKeys::one(old, Alg::A256Kw, [1; 32]))).seal(&place, b"v").expect("sealed");
    let (front, payload) = sealed.split_once('.').expect("a dot");
    let mut front: Front = front.parse().expect("a front");
    front.also.push(WrappedDek { key: further, ..front.wrapped.clone() });
    let mut recoverable = String::new();
    front.write(&mut recoverable);
    let recoverable = format!("{recoverable}.{payload}");
    let again = codec.rewrap(&place, &recoverable).expect("rewrapped").expect("it was under the old key");
    let again: Front = again.split_once('.').expect("a dot").0.parse().expect("a front");
    assert_eq!(again.also, front.also);

    for (stored, expected) in [
        ("", None),
        ("plain", Some("Cleartext")),
        ("nrv1:x", Some("Foreign")),
        ("v2:x", Some("Foreign")),
        ("hw2:x", Some("Unsupported")),
        ("hw1:x", Some("Malformed")),
        ("hw1:0001010101010101:x.y", Some("Malformed")),
    ] {
        let outcome = codec.rewrap(&place, stored);
        assert_eq!(outcome.as_ref().err().map(Error::kind), expected, "{stored}");
        assert!(expected.is_some() || outcome.is_ok_and(|text| text.is_none()), "{stored}");
    }
    let accepting = column.clone().cleartext(Cleartext::Accept);
    assert_eq!(codec.rewrap(&accepting.at(None).expect("unbound"), "plain").expect("left"), None);
    let full = column.clone().holding(Capacity(Some(sealed.len() as u64 - 1)));
    assert!(matches!(codec.rewrap(&full.at(None).expect("unbound"), &sealed), Err(Error::TooLarge { .. })));
    let unknown = Codec::new(Arc::new(MemoryKeys::one(new, Alg::A256Kw, [2; 32])));
    assert!(matches!(unknown.rewrap(&place, &sealed), Err(Error::UnknownKey(kid)) if kid == old));
}
