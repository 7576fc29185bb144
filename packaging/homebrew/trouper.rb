# A formula for a tap of one's own; packaging/README.md has the command. Not run yet: there was no Mac.
# OWNER stands for whoever publishes the repository. With the first release `url` and `sha256` name its sdist; until then --HEAD builds
# the main branch.
class Trouper < Formula
  include Language::Python::Virtualenv

  desc "LLM server of seven actors on MLX and Trio, with OpenAI's and Anthropic's APIs"
  homepage "https://github.com/OWNER/trouper"
  license "MIT"
  head "https://github.com/OWNER/trouper.git", branch: "main"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  # MLX and its Metal kernels come as wheels: building them from source needs Xcode and half an hour.
  def install
    python = Formula["python@3.13"].opt_bin/"python3.13"
    system python, "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--no-cache-dir", buildpath
    bin.install_symlink libexec/"bin/trouper"
    generate_completions_from_executable(bin/"trouper", "completion", shells: [:bash, :zsh, :fish])
  end

  service do
    run [opt_bin/"trouper", "serve"]
    keep_alive crashed: true
    log_path var/"log/trouper.log"
    error_log_path var/"log/trouper.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/trouper --version") unless build.head?
    assert_match "ok", shell_output("#{bin}/trouper doctor --port 0")
  end
end
