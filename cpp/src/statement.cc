#include "statement.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <vector>

#include "bytes.h"
#include "json.h"
#include "sha256.h"
#include "tvmflow/error.h"

namespace tvmflow {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxStatement = 1 << 24;  // a channel's document holds its history
constexpr size_t kMaxName = 128;
constexpr const char* kPayloadType = "application/vnd.in-toto+json";
constexpr const char* kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

// Whether text may be the name of a model, a version or a channel; such a name may be part of a path.
bool IsName(const std::string& text) {
  const std::string first = std::string(kLetters) + "_";
  return !text.empty() && text.size() <= kMaxName && first.find(text[0]) != std::string::npos &&
         text.find_first_not_of(first + ".-") == std::string::npos;
}

// Decodes standard base64 with its padding. Throws Error for other text.
std::string DecodeBase64(const std::string& text) {
  const size_t end = std::min(text.find('='), text.size()), padding = text.size() - end;
  const bool is_plain = text.find_first_not_of(std::string(kLetters) + "+/") >= end;
  if (text.empty() || text.size() % 4 != 0 || padding > 2 || !is_plain || text.find_first_not_of('=', end) < text.size()) {
    throw Error("its base64 is damaged");
  }
  std::string bytes(text.size() / 4 * 3, '\0');
  const int count = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                                    reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  if (count != static_cast<int>(bytes.size())) throw Error("its base64 is damaged");
  bytes.resize(bytes.size() - padding);
  return bytes;
}

// The bytes that a signature of DSSE covers.
std::string Authenticated(const std::string& payload) {
  const std::string type = kPayloadType;
  return "DSSEv1 " + std::to_string(type.size()) + " " + type + " " + std::to_string(payload.size()) + " " + payload;
}

// The payload of an envelope that a trusted key has signed. Throws Error.
std::string ReadPayload(const Field& envelope, const TrustedKeys& trusted) {
  envelope.At("payloadType").Word({kPayloadType});
  const std::vector<Field> signatures = envelope.At("signatures").Items();
  if (envelope.Members().size() != 3 || signatures.size() != 1 || signatures[0].Members().size() != 2) {
    throw Error("it is no envelope with one signature");
  }
  const std::string payload = DecodeBase64(envelope.At("payload").Text());
  const std::string signature = DecodeBase64(signatures[0].At("sig").Text());
  trusted.Verify(signatures[0].At("keyid").Text(), Authenticated(payload),
                 std::vector<unsigned char>(signature.begin(), signature.end()));
  return payload;
}

// The time in the form in which statements give theirs, UTC in ISO 8601 to the second: later times sort behind.
std::string Now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm time{};
  gmtime_r(&seconds, &time);
  char text[32];
  return std::string(text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S+00:00", &time));
}

bool IsTime(const std::string& text) {
  static const std::string kForm = "dddd-dd-ddTdd:dd:dd+00:00";
  const auto fits = [](char form, char letter) {
    return form == 'd' ? letter >= '0' && letter <= '9' : letter == form;
  };
  return text.size() == kForm.size() && std::equal(kForm.begin(), kForm.end(), text.begin(), fits);
}

// The folder of the highest numbers, the one that Python's settings name.
fs::path MemoryFolder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (const std::string home = variable("TVMFLOW_HOME"); !home.empty()) return fs::path(home) / "seen";
  if (const std::string state = variable("XDG_STATE_HOME"); !state.empty()) return fs::path(state) / "tvmflow" / "seen";
  if (const std::string home = variable("HOME"); !home.empty()) {
    return fs::path(home) / ".local" / "state" / "tvmflow" / "seen";
  }
  throw Error("there is no folder for the highest number seen; set TVMFLOW_HOME to one that stays");
}

// A file descriptor that is closed with this object.
class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags) : number_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {
    if (number_ < 0) throw Error("'" + path.string() + "' cannot be written; set TVMFLOW_HOME to a folder that stays");
  }
  ~Descriptor() { close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

// The number in a file, 0 without the file. Throws Error for a damaged one.
int64_t ReadNumber(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return 0;
  InputFile file(path.string());
  std::string text(static_cast<size_t>(std::min<uint64_t>(file.size(), 32)), '\0');
  file.Read(0, text.data(), text.size());
  int64_t number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || text.substr(static_cast<size_t>(stop - text.data())) != "\n" || number < 0) {
    throw Error("'" + path.string() + "' does not hold its number; remove it if you know why it is damaged");
  }
  return number;
}

// Replaces a file in one step, so that it holds the old number or the new one whenever the power fails.
void WriteNumber(const fs::path& path, int64_t number) {
  const fs::path partial = path.parent_path() / ("." + path.filename().string() + ".new");
  const std::string text = std::to_string(number) + "\n";
  std::error_code error;
  {
    const Descriptor file(partial, O_WRONLY | O_CREAT | O_TRUNC);
    if (write(file.number(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
        fsync(file.number()) != 0) {
      throw Error("'" + partial.string() + "' cannot be written; free space on its disk");
    }
  }
  fs::rename(partial, path, error);
  if (error) throw Error("'" + path.string() + "' cannot be written (" + error.message() + ")");
}

// Calls `call`; an Error of it becomes one that begins with the file of the statement.
template <typename Call>
void WithStatement(const SignedRelease& release, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    throw Error("the statement '" + release.statement + "' on " + release.address + " is refused: " + error.what());
  }
}

}  // namespace

Statement::Statement(const SignedRelease& release, const TrustedKeys& trusted) : release_(release) {
  static const std::string kScheme = "release://";
  const std::string& address = release.address;
  const size_t separator = address.find_first_of("@/", kScheme.size());
  if (address.compare(0, kScheme.size(), kScheme) == 0 && separator != std::string::npos) {
    name_ = address.substr(kScheme.size(), separator - kScheme.size());
    (address[separator] == '@' ? channel_ : version_) = address.substr(separator + 1);
  }
  if (!IsName(name_) || !IsName(channel_ + version_)) {
    throw Error("'" + address + "' names no release; expected release://NAME@CHANNEL or release://NAME/VERSION");
  }
  if (trusted.empty()) {
    throw Error("a statement needs a key that this machine trusts; name the file of one in TVMFLOW_TRUSTED_KEYS");
  }
  WithStatement(release_, [&] { Read(trusted); });
}

void Statement::Read(const TrustedKeys& trusted) {
  InputFile file(release_.statement);
  if (file.size() > kMaxStatement) throw Error("it is too large");
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.Read(0, text.data(), text.size());
  const Document document(text, "its document");
  const bool is_channel = !channel_.empty();
  const Field envelope = is_channel ? document.root().At("statement") : document.root();
  if (envelope.IsNull()) throw Error("it is not signed; sign it with `tvmflow sign " + release_.address + "`");
  const Document statement(ReadPayload(envelope, trusted), "its payload");
  const Field root = statement.root(), predicate = root.At("predicate");
  root.At("_type").Word({"https://in-toto.io/Statement/v1"});
  root.At("predicateType").Word({is_channel ? "urn:tvmflow:channel:1" : "urn:tvmflow:release:1"});
  const std::string owner = predicate.At("name").Text();
  const std::string subject = predicate.At(is_channel ? "channel" : "version").Text();
  if (owner != name_ || subject != channel_ + version_) {
    throw Error("it is about " + owner + (is_channel ? "@" : " ") + subject + "; do not trust it");
  }
  for (const Field& item : root.At("subject").Items()) digests_.insert(item.At("digest").At("sha256").Text());
  if (!is_channel) return;
  number_ = predicate.At("number").Count();
  const std::string expires = predicate.At("expires").Text();
  if (!IsTime(expires)) throw Error("it expires at '" + expires + "', which is no time; sign it again");
  if (expires < Now()) throw Error("it expired at " + expires + "; fetch a newer one");
}

void Statement::CheckArchive(const std::string& archive) const {
  std::error_code ignored;
  if (fs::is_directory(archive, ignored)) {
    throw Error("'" + archive + "' is a folder, and statements name archives; give the archive of the bundle");
  }
  InputFile file(archive);
  if (digests_.count(DigestOf(file)) == 0) {
    throw Error("bundle '" + archive + "' is none of " + release_.address + " by the statement '" +
                release_.statement + "'; fetch the bundle and the statement again");
  }
}

void Statement::CheckName(const std::string& bundle, const std::string& name) const {
  if (name == name_) return;
  throw Error("bundle '" + bundle + "' is one of '" + name + "', and " + release_.address + " was asked for; publish the "
              "release again");
}

void Statement::Remember() const {
  if (channel_.empty()) return;
  WithStatement(release_, [this] {
    // A device knows no address of a store, by which Python separates the channels of several.
    const fs::path folder = MemoryFolder() / "statements" / name_, path = folder / channel_;
    std::error_code ignored;
    fs::create_directories(folder, ignored);
    const Descriptor lock(folder / ("." + channel_ + ".lock"), O_RDWR | O_CREAT);
    if (flock(lock.number(), LOCK_EX) != 0) throw Error("'" + folder.string() + "' cannot be locked");
    const int64_t highest = ReadNumber(path);
    if (number_ < highest) {
      throw Error("its number is " + std::to_string(number_) + ", and this machine has seen " + std::to_string(highest) +
                  ": somebody has put an older one in its place");
    }
    if (number_ > highest) WriteNumber(path, number_);
  });
}

}  // namespace tvmflow
